"""The memory probe: it reads every byte, every time; how fast is for a benchmark to say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.kernels import _cpu


@given(
    lines=st.integers(0, 70), passes=st.integers(0, 3), ahead=st.sampled_from([0, 64, 8192]), shift=st.integers(0, 63)
)
def test_the_sum_is_that_of_all_words(lines: int, passes: int, ahead: int, shift: int) -> None:
    """Wherever the buffer begins, whatever is left over beside whole steps; a bit beyond its end does not count."""
    rng = np.random.default_rng(lines)
    memory = rng.integers(0, 256, 64 * 72, np.uint8)
    data = memory[shift : shift + 64 * lines]
    found, seconds = _cpu.read_stream(data.ctypes.data, data.nbytes, passes, ahead)
    words = np.frombuffer(data.tobytes(), "<u8")
    assert found == passes * int(words.sum(dtype=np.uint64)) % 2**64
    assert seconds >= 0


def test_a_part_of_a_line_is_refused() -> None:
    data = np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="100"):
        _cpu.read_stream(data.ctypes.data, 100, 1, 0)
