"""When a merge list and ranks of pieces describe the same encoder, and which pieces text can produce.

A merge list joins the listed *pair* of lowest position, leftmost first. Encoding by ranks joins the neighbours whose
*concatenation* has the lowest rank, and takes a whole piece at once where it is in the vocabulary. Call a piece c
reachable if the list, run on the bytes of c alone, ends with c; its last step is then the live pair of c.

1. Wherever a run of the list makes c, nothing has crossed the ends of c before, so it did there what it does on c
   alone: only reachable pieces are ever made, each by its live pair, and neighbours that spell c are that pair.
2. So if the vocabulary holds reachable pieces only, and positions of live pairs rise with the ids of their products,
   both rules choose the same step every time. Both conditions are checked here, and the second is refused by name.
3. A piece that is not reachable gets no rank. With `ignore_merges` it does need one, as it may be a whole pre-token;
   then the rule by ranks must not make it inside a longer one either, which by the same argument is a question about
   the bytes of the piece alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from waste.errors import UnsupportedError
from waste.tokenizer.spec import MAX_ID

Merge = tuple[bytes, bytes]

# A pair of ids is one int, so that the millions of look-ups a vocabulary takes build no tuples.
_SHIFT = MAX_ID.bit_length()


def live_merges(pieces: Mapping[bytes, int], merges: Sequence[Merge]) -> dict[int, int]:
    """The ids of all reachable pieces, each with the position of the merge that makes it (-1 for single bytes).

    All members and products of `merges` must be in `pieces`. Of a pair listed twice the last one counts, as in the
    `tokenizers` library.
    """
    positions = {pieces[left] << _SHIFT | pieces[right]: position for position, (left, right) in enumerate(merges)}
    products = [pieces[left + right] for left, right in merges]
    byte_ids = [pieces.get(bytes([byte])) for byte in range(256)]
    live: dict[int, int] = {}
    for piece, piece_id in pieces.items():
        if len(piece) == 1:
            live[piece_id] = -1
            continue
        start = [byte_ids[byte] for byte in piece]
        if None in start:
            continue
        parts, last = _run([part for part in start if part is not None], positions, products)
        if parts == [piece_id]:
            live[piece_id] = last
    return live


def check_order(pieces: Mapping[bytes, int], live: Mapping[int, int], source: str) -> None:
    """Raise UnsupportedError unless the merges that make pieces stand in the order of the ids of their products."""
    by_id = {piece_id: piece for piece, piece_id in pieces.items()}
    made = sorted((position, piece_id) for piece_id, position in live.items() if position >= 0)
    for (_, before), (position, after) in pairwise(made):
        if after < before:
            raise UnsupportedError(
                f"{source}: merge {position} makes id {after} ({by_id[after]!r}) after id {before} "
                f"({by_id[before]!r}) was made; merges that are not in the order of ids are not supported"
            )


def joined_by_rank(piece: bytes, ranks: Mapping[bytes, int]) -> bool:
    """Whether joining neighbours by the rank of their concatenation makes `piece` from its bytes."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        best, at = min((ranks.get(parts[i] + parts[i + 1], len(piece) << 32), i) for i in range(len(parts) - 1))
        if best == len(piece) << 32:
            return False
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return True


def _run(parts: list[int], positions: Mapping[int, int], products: Sequence[int]) -> tuple[list[int], int]:
    """Join neighbours by the list until nothing more joins; also the position of the last merge, -1 without one."""
    never = len(products)
    get = positions.get
    waiting = [get(left << _SHIFT | right, never) for left, right in pairwise(parts)]
    last = -1
    while waiting:
        best = min(waiting)
        if best == never:
            break
        last = best
        at = waiting.index(best)
        parts[at : at + 2] = [products[best]]
        del waiting[at]
        if at > 0:
            waiting[at - 1] = get(parts[at - 1] << _SHIFT | parts[at], never)
        if at < len(waiting):
            waiting[at] = get(parts[at] << _SHIFT | parts[at + 1], never)
    return parts, last
