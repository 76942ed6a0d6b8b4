"""How many bytes a model takes and how a RAM budget is divided. Arithmetic only: nothing is allocated.

budget = baseline (interpreter and libraries) + trunk in memory + session state at the context + work buffers
         + slots x record
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from waste.container.manifest import Manifest
from waste.container.strips import Strips
from waste.errors import ResourceError
from waste.kvcache.state import bytes_per_token, kda_bytes
from waste.models.config import ModelConfig
from waste.models.embedding import streamed_bytes, streams_embedding, table_entry
from waste.models.formats import Formats
from waste.models.spec import EMBEDDING, TRUNK_FILE, TensorSpec, bank_layers, draft_specs, trunk_specs
from waste.units import format_bytes

# A budget is never more than 72 % of the memory that is free: field runs were healthy there and eight
# times slower at 81 %, while the hit rate still rose (design, section 6).
HEALTHY_SHARE = 0.72

# What the interpreter, reader threads and allocators grow by while a model runs, beyond the arrays counted
# below: 1 to 3 MiB on nano-glm (LEARNED: peak-rss).
GROWTH_BYTES = 8 << 20

# What the cache and its policy write down, for every expert of the model: 0.7, 1.1 and 1.6 KB with the adaptive policy
# at 25, 50 and 98 % resident, 0.2 to 0.8 with lru. 24 MiB for GLM-5.3-Flash (LEARNED: cache-books).
BOOK_BYTES = 2048

# Room between the least that would do and what is recommended: a process's own size differs by 0.13 MiB between eight
# starts of the same command, and by the length of a path or two.
MARGIN_BYTES = 1 << 20

# What a loaded tokenizer takes: 3.1 MiB with 4,096 rows, 69 MiB with 160,080 (LEARNED: peak-rss).
TOKENIZER_BYTES, TOKENIZER_ROW_BYTES = 3 << 20, 512

# Tokens of one prefill chunk. Experts are read once per chunk; activations grow with it.
PREFILL_CHUNK = 256


@dataclass(frozen=True)
class Sizes:
    """Exact bytes and counts of a model in given formats."""

    trunk_bytes: int
    resident_trunk_bytes: int  # what of it is in memory, buffers of an embedding on disk included
    read_trunk_bytes: int  # what of it a token reads: all but the embedding table, of which it reads one row
    draft_bytes: int  # trunk part of the draft layer
    record_bytes: int  # one expert, padding included
    bank_bytes: int  # all expert records, the draft layer's included
    parameters: int  # all, the draft layer's included
    active_parameters: int  # a token multiplies with: trunk without the embedding, K experts a layer
    expert_layers: int  # without the draft layer
    experts: int  # per layer
    top_k: int

    @property
    def token_bytes(self) -> int:
        """Weights a token reads: the trunk and its row of the embedding once, top-k records in each MoE layer."""
        return self.read_trunk_bytes + self.top_k * self.expert_layers * self.record_bytes


def sizes(config: ModelConfig, formats: Formats, *, table_on_disk: bool = True) -> Sizes:
    """Sizes of `config` as a container with `formats` stores it.

    table_on_disk: whether a run leaves the embedding there, as it does with what is converted now; a tied one it
    never does. `models.embedding.streams_embedding` tells for a container.
    """
    trunk, draft = trunk_specs(config), draft_specs(config)
    record = formats.record(config).stride
    banks = bank_layers(config)
    per_expert = 3 * config.hidden_size * config.moe_intermediate_size
    experts = config.router.experts
    dense = _parameters(trunk)
    trunk_bytes = sum(map(formats.nbytes, trunk))
    table = next(spec for spec in trunk if spec.name == EMBEDDING)
    embedding, unread = table.rows * table.cols, formats.nbytes(table) * (table.rows - 1) // table.rows
    if config.tie_word_embeddings:  # it is the head too, which reads all of it
        embedding = unread = 0
        table_on_disk = False
    resident = trunk_bytes
    if table_on_disk:
        strips = Strips.of(formats.of(table), table.shape)
        resident += streamed_bytes(strips, PREFILL_CHUNK) - formats.nbytes(table)
    return Sizes(
        trunk_bytes=trunk_bytes,
        resident_trunk_bytes=resident,
        read_trunk_bytes=trunk_bytes - unread,
        draft_bytes=sum(map(formats.nbytes, draft)),
        record_bytes=record,
        bank_bytes=len(banks) * experts * record,
        parameters=dense + _parameters(draft) + len(banks) * experts * per_expert,
        active_parameters=dense - embedding + len(config.moe_layers) * config.router.top_k * per_expert,
        expert_layers=len(config.moe_layers),
        experts=experts,
        top_k=config.router.top_k,
    )


def resident_trunk_bytes(config: ModelConfig, manifest: Manifest) -> int:
    """What a container's trunk takes in memory: its tensors, and of an embedding on disk the strips of one chunk."""
    total = sum(entry.nbytes for entry in manifest.tensors if entry.file == TRUNK_FILE)
    if not streams_embedding(config, manifest):
        return total
    table = table_entry(manifest)
    return total - table.nbytes + streamed_bytes(Strips.of(table.fmt, table.shape), PREFILL_CHUNK)


def tokenizer_bytes(config: ModelConfig) -> int:
    """What the loaded tokenizer is expected to take; a running engine has measured it instead."""
    return TOKENIZER_BYTES + TOKENIZER_ROW_BYTES * config.vocab_size


def state_bytes(config: ModelConfig, context: int) -> int:
    """A session's caches and recurrent states, full to `context` tokens."""
    total = 0.0
    for i, kind in enumerate(config.attention):
        if kind == "kda":
            assert config.kda is not None
            total += kda_bytes(config.kda)
        else:
            indexer = config.indexer if config.index_kinds[i] == "full" else None
            total += context * bytes_per_token(config.mla, indexer)
    return int(total)


def buffer_bytes(config: ModelConfig) -> int:
    """Activations of one prefill chunk, generously: the widest arrays alive at the same time. And the cache's books."""
    d = config.hidden_size
    streams = config.hc.streams if config.hc else 1
    channels = config.kda.channels if config.kda else 0
    heads = config.mla.heads * (config.mla.row + config.mla.nope + config.mla.rope + config.mla.v)
    inner = 3 * max(config.intermediate_size, config.moe_intermediate_size * config.router.top_k)
    per_token = 3 * streams * d + config.router.top_k * d + max(8 * channels, heads) + inner
    books = BOOK_BYTES * len(config.moe_layers) * config.router.experts
    return 4 * (PREFILL_CHUNK * per_token + 4 * config.vocab_size) + books + GROWTH_BYTES


@dataclass(frozen=True)
class Budget:
    """A RAM budget and how it is spent. Every part in bytes; their sum is at most `ram_bytes`."""

    ram_bytes: int
    baseline_bytes: int
    trunk_bytes: int  # in memory
    state_bytes: int
    buffer_bytes: int
    slot_bytes: int  # one record
    slots: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but the expert slots."""
        return self.baseline_bytes + self.trunk_bytes + self.state_bytes + self.buffer_bytes

    @property
    def room_bytes(self) -> int:
        """What is left for experts."""
        return self.ram_bytes - self.fixed_bytes

    @property
    def cache_bytes(self) -> int:
        return self.slots * self.slot_bytes


def floor_bytes(config: ModelConfig, trunk_bytes: int, slot_bytes: int, context: int, baseline: int) -> int:
    """The least RAM that runs the model: everything fixed, and the experts one token needs in one layer."""
    experts = config.router.top_k * slot_bytes if config.moe_layers else 0
    return baseline + trunk_bytes + state_bytes(config, context) + buffer_bytes(config) + experts


def divide(
    config: ModelConfig, manifest: Manifest, ram: int, context: int, baseline: int, *, most: int | None = None
) -> Budget:
    """Divide `ram` bytes: what is fixed first, expert slots with the rest.

    Raises ResourceError when not even the experts of one token fit; its hint is the smallest change that would do.
    `most`: what `ram` cannot be more than on this machine; None where that is not known.
    """
    trunk = resident_trunk_bytes(config, manifest)
    slot = _slot(manifest, config)
    least = floor_bytes(config, trunk, slot, context, baseline)
    if ram < least:
        experts = f" and {config.router.top_k} experts" if config.moe_layers else ""
        raise ResourceError(
            f"a RAM budget of {format_bytes(ram)} is too small: {format_bytes(least)} are needed for the trunk, "
            f"a context of {context} tokens, buffers{experts}",
            hint=_fix(ram, least, _longest_context(config, context, ram - least), most),
        )
    fixed = Budget(ram, baseline, trunk, state_bytes(config, context), buffer_bytes(config), slot, 0)
    if not config.moe_layers:
        return fixed
    slots = min(fixed.room_bytes // slot, len(config.moe_layers) * config.router.experts)
    return Budget(ram, baseline, trunk, fixed.state_bytes, fixed.buffer_bytes, slot, int(slots))


def _longest_context(config: ModelConfig, context: int, room: int) -> int:
    """The most tokens, fewer than `context`, that make up for `room` bytes below zero; 0 when none do."""
    allowed = state_bytes(config, context) + room
    return bisect_right(range(1, context), allowed, key=lambda tokens: state_bytes(config, tokens))


def _fix(ram: int, least: int, context: int, most: int | None) -> str:
    """What to change about a budget that is too small."""
    wanted = least + MARGIN_BYTES
    fixes = []
    if most is None or wanted <= most:
        bare = " (a number without a unit is bytes)" if ram < 1 << 20 else ""
        fixes.append(f"--ram {_round_up(wanted)}MiB{bare}")
    if context > 0:
        fixes.append(f"--ctx {context}")
    return ", or ".join(fixes) or "convert again with fewer bits, as --trunk wt4, or run it where there is more RAM"


def _slot(manifest: Manifest, config: ModelConfig) -> int:
    return max((bank.layout.stride for bank in manifest.banks if bank.layer in config.moe_layers), default=0)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // (1 << 20))


def _parameters(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.rows * spec.cols for spec in specs)
