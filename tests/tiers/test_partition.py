"""Division of a tier: every layer has a home, nothing overspends, and what is left over is less than a slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from waste.errors import ResourceError
from waste.tiers.partition import POOLED_FROM, Partition, divide

PAGE = 4096
DIVISIONS = [None, "pooled", "layered", "routed"]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 8),
    share=st.floats(0, 1.3),
    division=st.sampled_from(DIVISIONS),
    seed=st.integers(0, 99),
)
def test_laws(sizes: list[int], experts: int, top_k: int, share: float, division, seed: int) -> None:
    assume(top_k <= experts)
    strides = {3 * i + 1: PAGE * n for i, n in enumerate(sizes)}
    counts = {layer: np.random.default_rng(seed + layer).poisson(3, experts) for layer in strides}
    budget = int(share * experts * sum(strides.values()))
    if budget < top_k * max(strides.values()):
        assume(budget < top_k * max(strides.values()))
        parts = None
        try:
            parts = divide(budget, strides, experts, top_k, counts, division=division)
        except ResourceError:
            return
        assert all(part.slots >= top_k for part in parts)  # only where nobody needs the largest record
        assert sum(part.nbytes for part in parts) <= budget
        return
    parts = divide(budget, strides, experts, top_k, counts, division=division)
    assert parts == divide(budget, strides, experts, top_k, counts, division=division)
    assert sorted(layer for part in parts for layer in part.layers) == sorted(strides)
    assert [part.layers[0] for part in parts] == sorted(part.layers[0] for part in parts)
    assert sum(part.nbytes for part in parts) <= budget
    left = budget - sum(part.nbytes for part in parts)
    for part in parts:
        assert top_k <= part.slots <= experts * len(part.layers)
        assert part.slots == experts * len(part.layers) or left < part.stride
        assert all(strides[layer] <= part.stride for layer in part.layers)
        mixed = len({strides[layer] for layer in part.layers}) > 1
        if mixed:  # the last resort: not even a pool for each size has room for a token
            assert len(parts) == 1
            assert top_k * sum(set(strides.values())) > budget
        else:
            assert part.stride == strides[part.layers[0]]
    if division in ("layered", "routed") and top_k * sum(strides.values()) <= budget:
        assert len(parts) == len(strides)
    if division == "pooled" and not mixed:
        assert len(parts) == len(set(strides.values()))


def test_layers_of_equal_records_get_equal_slots() -> None:
    parts = divide(100 * PAGE, dict.fromkeys(range(7), PAGE), 32, 4, division="layered")
    assert sorted(part.slots for part in parts) == [14, 14, 14, 14, 14, 15, 15]


def test_mixed_records_share_by_experts() -> None:
    """Half of all bytes: half of the experts of either size."""
    strides = {layer: PAGE * (3 if layer < 2 else 1) for layer in range(8)}
    budget = sum(strides.values()) * 32 // 2
    for division in ("pooled", "layered"):
        for part in divide(budget, strides, 32, 4, division=division):
            assert abs(part.slots / (32 * len(part.layers)) - 0.5) <= 0.05


@pytest.mark.parametrize("pages", range(40, 120))
def test_pools_share_by_their_layers_above_the_least(pages: int) -> None:
    """One layer of double records, six of single ones: 4 slots for each pool first, then alike for each layer."""
    one, six = divide(pages * PAGE, {0: 2 * PAGE} | dict.fromkeys(range(1, 7), PAGE), 32, 4, division="pooled")
    assert abs(one.slots - six.slots / 6) <= 4.4


def test_the_default_pools_what_is_nearly_all_there() -> None:
    strides = dict.fromkeys(range(7), PAGE)
    few = divide(int((POOLED_FROM - 0.02) * 7 * 32) * PAGE, strides, 32, 4)
    many = divide(int((POOLED_FROM + 0.02) * 7 * 32) * PAGE, strides, 32, 4)
    tiny = divide(11 * PAGE, strides, 32, 4)
    assert len(few) == 7
    assert many == (Partition(tuple(range(7)), PAGE, many[0].slots),)
    assert tiny == (Partition(tuple(range(7)), PAGE, 11),)


def test_slots_follow_use() -> None:
    """The slots that the most used experts would fill: layer 0 uses six of them, layer 1 all alike."""
    counts = {0: np.array([0] * 5 + [90] * 6 + [0] * 5), 1: np.full(16, 30)}
    first, second = divide(20 * PAGE, {0: PAGE, 1: PAGE}, 16, 2, counts, division="routed")
    assert (first.slots, second.slots) == (6, 14)
    first, second = divide(8 * PAGE, {0: PAGE, 1: PAGE}, 16, 2, counts, division="routed")
    assert (first.slots, second.slots) == (6, 2)


def test_too_little_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ResourceError, match="4 that a token uses") as caught:
        divide(4 * PAGE - 1, {1: PAGE, 2: PAGE}, 32, 4)
    assert "16.0 KiB" in str(caught.value.hint)


def test_no_layers_no_partitions() -> None:
    assert divide(0, {}, 32, 4) == ()
