"""The arithmetic of memory against what is really there: files on disk, arrays of a session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.backends.base import KdaState
from waste.container.reader import Container
from waste.engine.engine import Engine
from waste.errors import ResourceError
from waste.kvcache.state import SessionState
from waste.models.config import ModelConfig
from waste.models.formats import read_formats
from waste.models.spec import DRAFT_FILE, TRUNK_FILE
from waste.planner.footprint import MARGIN_BYTES, divide, floor_bytes, resident_trunk_bytes, sizes, state_bytes
from waste.units import parse_bytes

BASELINE = 100 << 20


@pytest.fixture(scope="module")
def container(default_nano: Path) -> Container:
    return Container.open(default_nano)


@pytest.fixture(scope="module")
def config(container: Container) -> ModelConfig:
    return ModelConfig.from_json(container.manifest.config)


def test_predicted_sizes_are_the_converted_ones(container: Container, config: ModelConfig) -> None:
    predicted = sizes(config, read_formats())
    for file, nbytes in ((TRUNK_FILE, predicted.trunk_bytes), (DRAFT_FILE, predicted.draft_bytes)):
        assert sum(t.nbytes for t in container.manifest.tensors_of(file)) == nbytes
    on_disk = sum((container.path / bank.file).stat().st_size for bank in container.manifest.banks)
    assert on_disk == predicted.bank_bytes
    table = next(t for t in container.manifest.tensors if t.name == "embed_tokens.weight")
    unread = table.nbytes // table.shape[0] * (table.shape[0] - 1)  # of the embedding a token reads its own row
    assert predicted.token_bytes == predicted.trunk_bytes - unread + 7 * 4 * predicted.record_bytes


def test_a_tied_embedding_is_read_as_the_head(config: ModelConfig) -> None:
    formats = read_formats("q4", "q8")
    apart, tied = sizes(config, formats), sizes(replace(config, tie_word_embeddings=True), formats)
    assert tied.read_trunk_bytes == tied.trunk_bytes
    assert abs(tied.read_trunk_bytes - apart.read_trunk_bytes) < 1024  # one row
    assert tied.active_parameters == apart.active_parameters


def test_parameters_are_those_of_the_checkpoint(nano_checkpoint: Path, config: ModelConfig) -> None:
    """Counted from the shard headers, scales left out: the README's 25.36 M."""
    from safetensors import safe_open

    total = 0
    for shard in sorted(nano_checkpoint.glob("*.safetensors")):
        with safe_open(shard, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                if not name.endswith("_scale_inv"):
                    total += int(np.prod(opened.get_slice(name).get_shape()))
    assert sizes(config, read_formats("q4", "q8")).parameters == total


def least_ram(container: Container, config: ModelConfig, context: int) -> int:
    trunk = sizes(config, read_formats()).resident_trunk_bytes
    return floor_bytes(config, trunk, container.manifest.banks[0].layout.stride, context, BASELINE)


def arrays(state: SessionState) -> Iterator[np.ndarray]:
    for layer in state.layers:
        if isinstance(layer, KdaState):
            yield from (layer.conv, layer.s)
        else:
            yield layer.rows
            if layer.index is not None:
                yield layer.index.keys


@pytest.mark.parametrize("context", [4, 512, 1000, 4096])
def test_predicted_state_is_what_a_full_session_holds(cpu_engine: Engine, context: int) -> None:
    model = cpu_engine.model
    state = model.new_state(context)
    assert sum(a.nbytes for a in arrays(state)) == state_bytes(model.config, context)


@given(ram=st.integers(1 << 20, 1 << 32), context=st.integers(1, 4096))
def test_a_budget_is_never_exceeded_and_never_wasted(
    container: Container, config: ModelConfig, ram: int, context: int
) -> None:
    least = least_ram(container, config, context)
    if ram < least:
        with pytest.raises(ResourceError, match="too small"):
            divide(config, container.manifest, ram, context, BASELINE)
        return
    budget = divide(config, container.manifest, ram, context, BASELINE)
    assert budget.fixed_bytes + budget.cache_bytes <= ram
    everything = len(config.moe_layers) * config.router.experts
    assert budget.slots == everything or ram - budget.fixed_bytes - budget.cache_bytes < budget.slot_bytes
    assert budget.slots >= config.router.top_k


def test_the_floor_is_exact(container: Container, config: ModelConfig) -> None:
    least = least_ram(container, config, 512)
    assert divide(config, container.manifest, least, 512, BASELINE).slots == config.router.top_k
    with pytest.raises(ResourceError):
        divide(config, container.manifest, least - 1, 512, BASELINE)


def test_more_context_takes_its_bytes_from_the_cache_alone(container: Container, config: ModelConfig) -> None:
    ram = least_ram(container, config, 4096) + (1 << 20)
    short = divide(config, container.manifest, ram, 64, BASELINE)
    long = divide(config, container.manifest, ram, 4096, BASELINE)
    taken = state_bytes(config, 4096) - state_bytes(config, 64)
    assert long.state_bytes - short.state_bytes == taken
    assert abs((short.slots - long.slots) * short.slot_bytes - taken) < short.slot_bytes


def fixes(hint: str | None) -> dict[str, int]:
    """{"ram": bytes, "ctx": tokens} of a refusal's hint."""
    found = dict(re.findall(r"--(ram|ctx) (\d+(?:MiB)?)", hint or ""))
    return {key: parse_bytes(value) if key == "ram" else int(value) for key, value in found.items()}


@settings(max_examples=30)
@given(context=st.integers(1, 4096), short=st.floats(0, 1.2))
def test_each_fix_of_a_refusal_is_one_and_the_smallest(
    container: Container, config: ModelConfig, context: int, short: float
) -> None:
    """A budget that lacks `short` of the session's state: more RAM, or a shorter context, or both would do."""
    least = least_ram(container, config, context)
    ram = least - 1 - int(short * state_bytes(config, context))
    with pytest.raises(ResourceError) as refusal:
        divide(config, container.manifest, ram, context, BASELINE)
    found = fixes(refusal.value.hint)
    assert least + MARGIN_BYTES <= found["ram"] < least + MARGIN_BYTES + (1 << 20)
    divide(config, container.manifest, found["ram"], context, BASELINE)
    stateless = least - state_bytes(config, context)
    fitting = [tokens for tokens in range(1, context) if stateless + state_bytes(config, tokens) <= ram]
    assert found.get("ctx") == max(fitting, default=None)
    if "ctx" in found:
        divide(config, container.manifest, ram, found["ctx"], BASELINE)


@pytest.mark.parametrize("fits", [1, 2, 777, 4095])
def test_the_longest_context_is_exact(container: Container, config: ModelConfig, fits: int) -> None:
    with pytest.raises(ResourceError) as refusal:
        divide(config, container.manifest, least_ram(container, config, fits), 4096, BASELINE)
    assert fixes(refusal.value.hint)["ctx"] == fits


def test_a_fix_that_the_machine_cannot_give_is_not_named(container: Container, config: ModelConfig) -> None:
    least = least_ram(container, config, 4096)
    enough = least + MARGIN_BYTES
    for ram, most, named in (
        (least - 1, enough, {"ram", "ctx"}),
        (least - 1, enough - 1, {"ctx"}),
        (1 << 20, enough, {"ram"}),
        (1 << 20, enough - 1, set()),
    ):
        with pytest.raises(ResourceError) as refusal:
            divide(config, container.manifest, ram, 4096, BASELINE, most=most)
        assert fixes(refusal.value.hint).keys() == named
        assert refusal.value.hint


def test_a_budget_without_a_unit_is_told_what_it_means(container: Container, config: ModelConfig) -> None:
    with pytest.raises(ResourceError) as refusal:
        divide(config, container.manifest, 220, 512, BASELINE)
    assert "a RAM budget of 220 B" in refusal.value.message
    assert "a number without a unit is bytes" in (refusal.value.hint or "")


def test_a_model_without_experts_needs_its_ram_too(container: Container, config: ModelConfig) -> None:
    dense = replace(config, mlp=("dense",) * config.num_layers)
    least = floor_bytes(dense, resident_trunk_bytes(dense, container.manifest), 0, 512, BASELINE)
    budget = divide(dense, container.manifest, least, 512, BASELINE)
    assert (budget.slots, budget.fixed_bytes) == (0, least)
    with pytest.raises(ResourceError, match="too small") as refusal:
        divide(dense, container.manifest, least - 1, 512, BASELINE)
    assert "experts" not in refusal.value.message
