"""What a container says about its model is believed only as far as it fits together, down to the last tensor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste import quant
from waste.container.layout import TRUNK_ALIGN, RecordLayout, align_up, matrix_shape
from waste.container.manifest import BankEntry, Manifest, TensorEntry
from waste.errors import InputError
from waste.models.config import ModelConfig
from waste.models.formats import Formats, read_formats
from waste.models.hf_config import from_hf
from waste.models.spec import TensorSpec, bank_layers, bank_name, draft_specs, trunk_specs
from waste.models.stored import stored_config

Change = Callable[[dict[str, Any]], object]


def entries(file: str, specs: list[TensorSpec], formats: Formats) -> list[TensorEntry]:
    found, offset = [], 0
    for spec in specs:
        fmt = formats.of(spec)
        nbytes = quant.get(fmt).nbytes(*matrix_shape(spec.shape))
        found.append(TensorEntry(spec.name, file, fmt, spec.shape, offset, nbytes, 0))
        offset = align_up(offset + nbytes, TRUNK_ALIGN)
    return found


@pytest.fixture
def manifest(glm: dict[str, Any]) -> Manifest:
    """GLM-5.3-Flash as the converter would describe it, without its weights."""
    config, _ = from_hf(glm, None)
    formats = read_formats("q4", "q8")
    layout = formats.record(config)
    experts = config.router.experts
    return Manifest(
        tool="1",
        options={},
        provenance={},
        architecture=config.family,
        config=json.loads(json.dumps(config.to_json())),
        stop_ids=config.eos_token_ids,
        formats=vars(formats),
        tensors=(
            *entries("trunk.bin", trunk_specs(config), formats),
            *entries("draft.bin", draft_specs(config), formats),
        ),
        banks=tuple(BankEntry(i, bank_name(i), experts, layout, 0) for i in bank_layers(config)),
        files=(),
    )


def test_what_the_converter_writes_is_accepted(manifest: Manifest, glm: dict[str, Any]) -> None:
    again = Manifest.from_bytes(manifest.to_bytes(), "manifest.json")
    assert stored_config(again) == from_hf(glm, None)[0]


def other(entry: TensorEntry, **changes: Any) -> TensorEntry:
    return dataclasses.replace(entry, **changes)


CHANGES: dict[str, Callable[[Manifest], dict[str, Any]]] = {
    "lacks tensor": lambda m: {"tensors": m.tensors[:-1]},
    "does not have": lambda m: {"tensors": (*m.tensors, other(m.tensors[0], name="more", file="trunk.bin"))},
    "'other.bin'": lambda m: {"tensors": (*m.tensors, other(m.tensors[0], name="more", file="other.bin"))},
    "in bf16": lambda m: {"tensors": (other(m.tensors[0], fmt="bf16"), *m.tensors[1:])},
    r"\[154879, 4096\]": lambda m: {"tensors": (other(m.tensors[0], shape=(154879, 4096)), *m.tensors[1:])},
    "layer 45 has no experts": lambda m: {"banks": m.banks[:-1]},
    "layer 3 has no experts": lambda m: {"banks": ()},
    "layer 2 has experts": lambda m: {"banks": (*m.banks, dataclasses.replace(m.banks[0], layer=2, file="x"))},
    "287 experts": lambda m: {"banks": (dataclasses.replace(m.banks[0], experts=287), *m.banks[1:])},
    "in 'x.bin'": lambda m: {"banks": (dataclasses.replace(m.banks[0], file="x.bin"), *m.banks[1:])},
    "records of layer 3": lambda m: {
        "banks": (dataclasses.replace(m.banks[0], layout=RecordLayout.of("q4", "q4", "q4", 4096, 128)), *m.banks[1:])
    },
    "records of layer 4": lambda m: {
        "banks": (
            m.banks[0],
            dataclasses.replace(m.banks[1], layout=RecordLayout.of("q8", "q4", "q4", 4096, 2048)),
            *m.banks[2:],
        )
    },
    "stop ids": lambda m: {"stop_ids": m.stop_ids[:1]},
    "architecture": lambda m: {"architecture": "kimi_linear"},
    "for nothing": lambda m: {"formats": {}},
    "for down, gate, trunk, up, not for": lambda m: {
        "formats": {"gate": "q4", "up": "q4", "down": "q4", "trunk": "q8"}
    },
    "not for": lambda m: {"formats": {k: v for k, v in m.formats.items() if k != "shared"}},
    "in q8, expected": lambda m: {"formats": m.formats | {"shared": "wt4"}},
    "unknown number format 'q5'": lambda m: {"formats": m.formats | {"kda": "q5"}},
    r"\(table\) are wt4": lambda m: {"formats": m.formats | {"table": "wt4"}},
    r"\(small\) are q8": lambda m: {"formats": m.formats | {"small": "q8"}},
}


@pytest.mark.parametrize("message", CHANGES)
def test_contradictions_are_named(manifest: Manifest, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        stored_config(dataclasses.replace(manifest, **CHANGES[message](manifest)))
    assert caught.value.hint is not None
    assert "\n" not in caught.value.message


# -- the config alone

IMPOSSIBLE: dict[str, Change] = {
    "num_layers: expected a whole number": lambda c: c.update(num_layers="45"),
    "vocab_size: expected a whole number": lambda c: c.update(vocab_size=154880.0),
    "tie_word_embeddings: expected true or false": lambda c: c.update(tie_word_embeddings=0),
    "family: expected a string": lambda c: c.update(family=None),
    "attention has 45 entries for 46": lambda c: c.update(num_layers=46),
    "mlp has 44": lambda c: c["mlp"].pop(),
    r"attention\[0\]: expected one of kda, mla": lambda c: c["attention"].__setitem__(0, "x"),
    "mla: expected an object": lambda c: c.update(mla=None),
    "kda is null": lambda c: c.update(kda=None),
    "'scale' is missing": lambda c: c["mla"].pop("scale"),
    "'more' is unknown": lambda c: c.update(more=1),
    "hidden_size: expected a whole number": lambda c: c.update(hidden_size=-4096),
    "mla.heads is 0": lambda c: c["mla"].update(heads=0),
    "hc.eps is 0": lambda c: c["hc"].update(eps=0.0),
    "rms_norm_eps: expected a finite": lambda c: c.update(rms_norm_eps=float("inf")),
    "eos_token_ids: expected an array": lambda c: c.update(eos_token_ids=3),
    "id 154880 is not below": lambda c: c.update(pad_token_id=154880),
    "router.groups is 0": lambda c: c["router"].update(groups=0),
    "7 groups": lambda c: c["router"].update(groups=7),
    "chooses 289 of 288": lambda c: c["router"].update(top_k=289),
    "no layer has experts": lambda c: c.update(mlp=["dense"] * 45),
    "draft_layers is 2": lambda c: c.update(draft_layers=2),
    "not a multiple of pool": lambda c: c["indexer"].update(topk=2047),
    "shares the selection of none": lambda c: c.update(index_kinds=["shared"] * 45),
    "mla.rotary turns 2 of 0": lambda c: c["mla"].update(rotary={"dim": 2, "inv_freq": [1.0]}),
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_configs_are_refused(manifest: Manifest, message: str) -> None:
    IMPOSSIBLE[message](manifest.config)
    with pytest.raises(InputError, match=message) as caught:
        ModelConfig.from_json(manifest.config)
    assert "\n" not in caught.value.message


def leaves(node: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in a document, containers included."""
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    inner = [place for key, value in members for place in leaves(value, (*path, key))]
    return [path, *inner] if path else inner


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.just(2**63), st.floats(), st.text(max_size=3),
    st.just([]), st.just({}), st.just("kda"),
)  # fmt: skip


def test_any_odd_value_is_refused_or_means_what_it_says(glm: dict[str, Any]) -> None:
    whole = from_hf(glm, None)[0].to_json()

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(leaves(json.loads(json.dumps(whole)))), ODD)
    def law(place: tuple[Any, ...], odd: object) -> None:
        document = json.loads(json.dumps(whole))
        node = document
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = odd
        try:
            found = ModelConfig.from_json(document)
        except InputError:
            return
        assert json.loads(json.dumps(found.to_json())) == document
        assert len(trunk_specs(found)) + len(draft_specs(found)) + len(bank_layers(found)) > 0

    law()
