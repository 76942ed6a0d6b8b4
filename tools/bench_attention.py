"""Speed of KDA, absorbed MLA and the sparse index against torch, in one thread's CPU time.

    python tools/bench_attention.py           Markdown tables
    python tools/bench_attention.py --json    the same for programs

The widths are GLM-5.3-Flash's: KDA 64 heads of 128 x 128, MLA 64 heads over rows of 512 + 64, index 32 heads of 128
over pools of 4, all float32. MLA and index are whole stages whose projections have next to no size. Ours and torch take
turns, and the best of the rounds counts. KDA walks over the states of many layers, so that each comes from memory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stopwatch import copy_rate, seconds

from waste.hardware.brief import look
from waste.kernels import _cpu
from waste.quant import get

F32 = npt.NDArray[np.float32]
HEADS, KEY = 64, 128  # of KDA
LATENT, ROPE = 512, 64  # of an MLA row
INDEX_HEADS, INDEX_DIM, POOL, KEEP = 32, 128, 4, 512
CHUNK = 64


@dataclass(frozen=True)
class Row:
    """One line of the report: the best seconds of both, and what limits ours."""

    what: str
    ours_s: float
    torch_s: float
    rate: float
    unit: str


def versus(rounds: int, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Seconds of each, taken in turns."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds + 1)][1:]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


class Weights:
    """Small dense matrices for the stages, kept alive."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.kept: list[Any] = []

    def __call__(self, rows: int, cols: int) -> Any:
        values = (self.rng.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32)
        blob = np.ascontiguousarray(get("f32").encode(values)).view(np.uint8)
        self.kept.append(blob)
        return _cpu.Weight(blob.ctypes.data, get("f32").code, rows, cols, blob)


def kda(pool: Any, rng: np.random.Generator, rounds: int, layers: int) -> list[Row]:
    """The delta rule of one layer: tokens alone, and a chunk."""
    shape = (CHUNK, HEADS, KEY)
    states = rng.standard_normal((layers, HEADS, KEY, KEY), np.float32)
    q, k = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    v, decay, beta, out = torch.randn(shape), torch.rand(shape), torch.rand(*shape[:2], 1), torch.empty(shape)
    inputs = [a.data_ptr() for a in (q, k, v, decay, beta)]

    def ours(layer: int, tokens: int) -> None:
        _cpu.delta_rule(pool, *inputs, tokens, HEADS, KEY, states[layer].ctypes.data, out.data_ptr())

    twins = [torch.from_numpy(s.copy()) for s in states]

    def recurrent(s: torch.Tensor, tokens: int) -> None:
        """Token by token, in place."""
        for t in range(tokens):
            known = torch.bmm((k[t] * decay[t])[:, None], s)[:, 0]
            s.mul_(decay[t][:, :, None]).baddbmm_(k[t][:, :, None], (beta[t] * (v[t] - known))[:, None])
            torch.bmm(q[t][:, None], s)

    lower = torch.tril(torch.ones(CHUNK, CHUNK), -1)
    eye = torch.eye(CHUNK)

    def chunked(s: torch.Tensor) -> None:
        """The whole chunk by matrix products (UT transform). The decays here would overflow it: timing only."""
        total = torch.log(decay).clamp(min=-0.5).cumsum(0).transpose(0, 1)  # (H, T, K)
        kh, qh, vh, bh = k.transpose(0, 1), q.transpose(0, 1), v.transpose(0, 1), beta.transpose(0, 1)
        grown, shrunk, asked = kh * total.exp(), kh * (-total).exp(), qh * total.exp()
        a = (grown @ shrunk.transpose(1, 2)) * lower * bh
        u = torch.linalg.solve_triangular(eye + a, bh * (vh - grown @ s), upper=False, unitriangular=True)
        _ = asked @ s + (asked @ shrunk.transpose(1, 2)).tril() @ u
        s.mul_(total[:, -1].exp()[:, :, None]).baddbmm_((shrunk * total[:, -1:].exp()).transpose(1, 2), u)

    moved, few = 2 * states[0].nbytes, 4
    one, one_torch = versus(
        rounds, lambda: [ours(i, 1) for i in range(layers)], lambda: [recurrent(s, 1) for s in twins]
    )
    many, many_torch = versus(
        rounds, lambda: [ours(i, CHUNK) for i in range(few)], lambda: [recurrent(s, CHUNK) for s in twins[:few]]
    )
    _, products = versus(rounds, lambda: None, lambda: [chunked(s) for s in twins[:few]])
    one, one_torch = one / layers, one_torch / layers
    many, many_torch, products = (a / few / CHUNK for a in (many, many_torch, products))
    updates = 4 * states[0].size / many / 1e9
    chunk = f"KDA, chunk of {CHUNK}, per token"
    return [
        Row("KDA, one token", one, one_torch, moved / one / 1e9, "GB/s read + written"),
        Row(chunk, many, many_torch, updates, "G multiply-adds/s"),
        Row(f"{chunk}; torch by matrix products", many, products, updates, "G multiply-adds/s"),
    ]


def mla(pool: Any, rng: np.random.Generator, rounds: int, contexts: list[int]) -> list[Row]:
    """One query of 64 heads over all rows, and over 2048 selected ones."""
    row = LATENT + ROPE
    weight = Weights(rng)
    v_up, o = weight(HEADS, LATENT), weight(1, HEADS)
    cache = rng.standard_normal((max(contexts), row), np.float32)
    q = rng.standard_normal((HEADS, row), np.float32)
    scale, none = 0.05, weight(1, 1)
    layer = _cpu.MlaLayer(
        q_a=None, q_a_norm=0, q_b=none, kv_a=none, kv_a_norm=0, k_up=none, v_up=v_up, o=o, latent_eps=0.0, scale=scale,
        inv_freq=0, dim=1, heads=HEADS, kv_lora=LATENT, nope=0, rope=ROPE, v=1,
    )  # fmt: skip
    rows_t, q_t = torch.from_numpy(cache), torch.from_numpy(q)

    def attend(start: int, positions: npt.NDArray[np.int32] | None) -> None:
        offsets = None if positions is None else np.array([0, len(positions)], np.int64)
        _cpu.mla_attend(pool, q[None], cache, start, positions, offsets, layer)

    def theirs(keys: torch.Tensor) -> None:
        torch.softmax((q_t * scale) @ keys.T, -1) @ keys[:, :LATENT]

    found = []
    for context in contexts:
        a, b = versus(rounds, lambda n=context: attend(n - 1, None), lambda n=context: theirs(rows_t[:n]))
        work = HEADS * context * (row + LATENT)
        found.append(Row(f"MLA, {context} rows", a, b, work / a / 1e9, "G multiply-adds/s"))
    chosen = np.sort(rng.choice(max(contexts), 2048, replace=False)).astype(np.int32)
    picked = torch.from_numpy(chosen.astype(np.int64))
    a, b = versus(rounds, lambda: attend(max(contexts) - 1, chosen), lambda: theirs(rows_t[picked]))
    work = HEADS * len(chosen) * (row + LATENT)
    found.append(Row(f"MLA, 2048 selected of {max(contexts)}", a, b, work / a / 1e9, "G multiply-adds/s"))
    return found


def index(pool: Any, rng: np.random.Generator, rounds: int, contexts: list[int]) -> list[Row]:
    """Scores and choice of one query; the choice alone."""
    weight = Weights(rng)
    wide, dim = INDEX_HEADS * INDEX_DIM, 16
    wq_b, wk, proj, gate = (weight(rows, dim) for rows in (wide, INDEX_DIM, INDEX_HEADS, INDEX_DIM))
    norm, bias, ape = np.ones(INDEX_DIM, np.float32), np.zeros(INDEX_DIM, np.float32), np.zeros((POOL, INDEX_DIM))
    ape = ape.astype(np.float32)
    keys = rng.standard_normal((max(contexts) // POOL, INDEX_DIM), np.float32)
    open_keys, open_gates = np.zeros((2, POOL, INDEX_DIM), np.float32)
    x = np.ones((1, dim), np.float32)
    q_t, w_t, keys_t = torch.randn(INDEX_HEADS, INDEX_DIM), torch.randn(INDEX_HEADS), torch.from_numpy(keys)
    indexer = _cpu.Indexer(
        wq_b=wq_b, wk=wk, proj=proj, gate=gate, norm=norm.ctypes.data, norm_bias=bias.ctypes.data,
        ape=ape.ctypes.data, inv_freq=0, rotary=0, norm_eps=1e-6, dim=dim, q_lora=dim, heads=INDEX_HEADS,
        head_dim=INDEX_DIM, pool=POOL, keep=KEEP,
    )  # fmt: skip

    def ours(tokens: int) -> None:
        _cpu.index(pool, x, x, tokens - 1, keys, open_keys, open_gates, indexer)

    def theirs(pools: int) -> None:
        score = w_t @ torch.relu(q_t @ keys_t[:pools].T)
        torch.topk(score, KEEP, sorted=False).indices.sort()

    found = []
    for context in contexts:
        pools = context // POOL
        a, b = versus(rounds, lambda n=context: ours(n), lambda n=pools: theirs(n))
        found.append(Row(f"index, {context} tokens", a, b, pools * wide / a / 1e9, "G multiply-adds/s"))
        score = rng.standard_normal(pools)
        chosen, score_t = np.empty(KEEP, np.int32), torch.from_numpy(score)
        a, b = versus(
            10 * rounds,
            lambda s=score, c=chosen: _cpu.choose(s.ctypes.data, len(s), KEEP, c.ctypes.data),
            lambda s=score_t: torch.topk(s, KEEP, sorted=False).indices.sort(),
        )
        found.append(Row(f"choice of {KEEP} of {pools}", a, b, pools / a / 1e9, "G scores/s"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=34, help="KDA states to walk over, 4 MB each")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rng, pool = np.random.default_rng(0), _cpu.Pool(1)
    contexts = [2048, 8192, 32768]
    rows = [
        *kda(pool, rng, chosen.rounds, chosen.layers),
        *mla(pool, rng, chosen.rounds, contexts),
        *index(pool, rng, chosen.rounds, contexts[1:]),
    ]
    machine, copies = look(Path.cwd()), copy_rate()
    if chosen.json:
        table = [{**vars(r), "ratio": round(r.ours_s / r.torch_s, 3)} for r in rows]
        found = {
            "cpu": machine.cpu,
            "instruction_sets": list(machine.instruction_sets),
            "load_average": round(os.getloadavg()[0], 2),
            "copy_gb_per_s": round(copies, 1),
            "rows": table,
        }
        print(json.dumps(found, indent=2))
        return
    print(f"{machine.cpu}, {', '.join(machine.instruction_sets)}; load average {os.getloadavg()[0]:.2f}")
    print(f"one thread copies {copies:.1f} GB/s (read and written); torch {torch.__version__}, one thread\n")
    print("| one layer, one thread | ours, us | torch, us | ours / torch | rate |\n|---|---|---|---|---|")
    for r in rows:
        rate = f"{r.rate:.3g} {r.unit}"
        print(f"| {r.what} | {r.ours_s * 1e6:.0f} | {r.torch_s * 1e6:.0f} | {r.ours_s / r.torch_s:.2f} | {rate} |")


if __name__ == "__main__":
    main()
