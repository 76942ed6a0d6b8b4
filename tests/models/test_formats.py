"""Format mixes as people write them: what a text means, the one text of a mix, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste import quant
from waste.errors import UsageError
from waste.models.formats import DEFAULT_EXPERTS, DEFAULT_TRUNK, TRUNK, Formats, read_formats

ANY = st.sampled_from(quant.names())
MATRICES = [name for name in TRUNK if name not in ("table", "small")]
TABLE = st.sampled_from([name for name in quant.names() if quant.get(name).bits >= 8])


@st.composite
def formats(draw: st.DrawFn) -> Formats:
    gate = draw(ANY)
    trunk = {name: draw(ANY) for name in MATRICES}
    return Formats(gate, gate, draw(ANY), **trunk, table=draw(TABLE), small=draw(st.sampled_from(["bf16", "f32"])))


@given(formats())
def test_a_mix_has_one_text_and_the_text_means_it(mix: Formats) -> None:
    assert read_formats(mix.experts_text, mix.trunk_text) == mix
    assert mix.texts() == {"experts": mix.experts_text, "trunk": mix.trunk_text}


@given(formats(), st.randoms())
def test_the_order_of_classes_does_not_matter(mix: Formats, random: object) -> None:
    items = [f"{name}={getattr(mix, name)}" for name in TRUNK]
    random.shuffle(items)  # type: ignore[attr-defined]
    assert read_formats(mix.experts_text, ",".join(items)) == mix
    assert read_formats(mix.experts_text, ",".join(["q4", *items])) == mix


@pytest.mark.parametrize("fmt", quant.names())
def test_one_format_is_for_all_that_may_have_it(fmt: str) -> None:
    found = read_formats("wt2+wt3", fmt)
    assert (found.gate, found.up, found.down) == ("wt2", "wt2", "wt3")
    assert {getattr(found, name) for name in MATRICES} == {fmt}
    assert found.table == (fmt if fmt in ("f32", "bf16", "q8") else "q8")
    assert found.small == ("f32" if fmt == "f32" else "bf16")
    assert found.trunk_text == fmt


def test_classes_are_on_top_of_the_default_or_of_a_format() -> None:
    default = read_formats()
    assert vars(read_formats(trunk="shared=wt2, mla=bf16")) == vars(default) | {"shared": "wt2", "mla": "bf16"}
    assert vars(read_formats(trunk="wt4, shared=q8")) == vars(read_formats(trunk="wt4")) | {"shared": "q8"}
    assert read_formats(trunk="q6,shared=q8,mla=q6").trunk_text == "q6,shared=q8"


def test_spaces_do_not_matter() -> None:
    assert read_formats(" wt2 + wt3 ", " q6 , kda = q8 ") == read_formats("wt2+wt3", "q6,kda=q8")


def test_the_default_is_written_as_it_is_shown() -> None:
    assert read_formats().texts() == {"experts": DEFAULT_EXPERTS, "trunk": DEFAULT_TRUNK}


@pytest.mark.parametrize(
    "trunk",
    ["", ",", "q6,", "q5", "q6,q8", "kda", "kda=", "kda=q5", "=q8", "kda=q8=q8", "gate=q8", "KDA=q8", "kda=q8,kda=q8",
     "q6,experts=wt3", "table=q6", "q8,table=wt4", "small=q8", "wt2+wt3", "kda=wt2+wt3", "q6;kda=q8", "q6\nkda=q8"],
)  # fmt: skip
def test_texts_that_mean_nothing(trunk: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_formats(trunk=trunk)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("experts", ["", "+", "wt2+", "+wt2", "wt2+wt3+wt4", "q5", "wt3,wt4", "kda=q8"])
def test_experts_that_mean_nothing(experts: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_formats(experts)
    assert "\n" not in caught.value.message
