"""Whatever cannot be converted is refused by name before a byte is written: nothing is at the target afterwards."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from waste.convert import ConvertOptions, convert, plan_conversion
from waste.errors import InputError, UnsupportedError, UsageError, WasteError

WRAPPER = "model.language_model."
EXPERT = f"{WRAPPER}layers.1.mlp.experts.1.down_proj.weight"
DENSE = f"{WRAPPER}layers.0.mlp.gate_proj.weight"  # 144 x 160: a grid of 2 x 2 scales


def refusal(tiny: Any, dst: Path, kind: type[WasteError]) -> WasteError:
    """The error of both `plan_conversion` and `convert`, which must be one and leave nothing behind."""
    with pytest.raises(kind) as planned:
        plan_conversion(str(tiny.path), dst, ConvertOptions())
    with pytest.raises(kind) as caught:
        convert(str(tiny.path), dst, ConvertOptions())
    assert caught.value.message == planned.value.message
    assert "\n" not in caught.value.message
    assert not dst.exists()
    return caught.value


def stored(tiny: Any, dtype: str, shape: tuple[int, ...], values: np.ndarray) -> Any:
    return type(next(iter(tiny.tensors.values())))(dtype, shape, values.tobytes())


# -- config first


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("index_kpool_compress", False, UnsupportedError),
        ("mhc", False, UnsupportedError),
        ("hidden_act", "gelu", UnsupportedError),
        ("index_kpool", "4", InputError),
    ],
)
def test_config_is_refused_before_any_weight_file_is_opened(
    tiny: Any, dst: Path, key: str, value: object, kind: type[WasteError]
) -> None:
    tiny.text[key] = value
    tiny.write()
    for shard in tiny.path.glob("*.safetensors"):
        shard.write_bytes(b"")  # would be an error of its own
    assert key in refusal(tiny, dst, kind).message


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"a": 1}', b"[" * 100_000])
def test_config_that_is_no_config(tiny: Any, dst: Path, text: bytes) -> None:
    (tiny.path / "config.json").write_bytes(text)
    refusal(tiny, dst, InputError)


# -- tensors


def test_missing_tensors_are_named_and_counted(tiny: Any, dst: Path) -> None:
    gone = [name for name in tiny.tensors if ".experts.2." in name and not name.endswith("_scale_inv")]
    for name in gone:
        del tiny.tensors[name]
    tiny.write()
    message = refusal(tiny, dst, InputError).message
    assert str(len(gone)) in message
    assert f"and {len(gone) - 3} more" in message
    assert sum(name in message for name in gone) == 3


@pytest.mark.parametrize(
    "name", ["lm_head.weight", f"{WRAPPER}embed_tokens.weight", EXPERT, f"{WRAPPER}layers.1.hc_ffn_fn"]
)
def test_one_missing_tensor(tiny: Any, dst: Path, name: str) -> None:
    del tiny.tensors[name]
    tiny.write()
    message = refusal(tiny, dst, InputError).message
    assert repr(name) in message
    assert "missing" in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EXPERT, (40, 160)),
        ("lm_head.weight", (319, 160)),
        (f"{WRAPPER}norm.weight", (1, 161)),
        (f"{WRAPPER}layers.0.self_attn.A_log", (3,)),
        (f"{WRAPPER}layers.0.self_attn.q_conv1d.weight", (32, 5)),
        (f"{WRAPPER}layers.1.self_attn.kv_b_proj.weight", (160, 24)),
    ],
)
def test_wrong_shapes(tiny: Any, dst: Path, name: str, shape: tuple[int, ...]) -> None:
    tiny.tensors.pop(f"{name}_scale_inv", None)
    tiny.tensors[name] = stored(tiny, "F32", shape, np.zeros(shape, np.float32))
    tiny.write()
    message = refusal(tiny, dst, InputError).message
    assert repr(name) in message
    assert str(list(shape)) in message
    assert "expected" in message


def test_many_wrong_tensors_are_one_line_with_three_names(tiny: Any, dst: Path) -> None:
    wrong = [name for name in tiny.tensors if name.endswith("input_layernorm.weight") or ".mlp.gate." in name]
    for name in wrong:
        tiny.tensors[name] = stored(tiny, "F32", (7,), np.zeros(7, np.float32))
    tiny.write()
    message = refusal(tiny, dst, InputError).message
    assert sum(repr(name) in message for name in wrong) == 3
    assert f"and {len(wrong) - 3} more" in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{WRAPPER}layers.0.self_attn.A_log", (1, 1, 2, 1)),
        (f"{WRAPPER}layers.0.self_attn.q_conv1d.weight", (32, 4)),
    ],
)
def test_axes_of_one_do_not_matter_for_vectors_and_convolutions(
    tiny: Any, dst: Path, clean: dict[str, bytes], name: str, shape: tuple[int, ...]
) -> None:
    tensor = tiny.tensors[name]
    tiny.tensors[name] = type(tensor)(tensor.dtype, shape, tensor.data)
    tiny.write()
    convert(str(tiny.path), dst, ConvertOptions())
    assert (dst / "trunk.bin").read_bytes() == clean["trunk.bin"]


@pytest.mark.parametrize("dtype", ["I32", "U8", "F8_E5M2", "BOOL"])
def test_dtypes_that_are_no_weights(tiny: Any, dst: Path, dtype: str) -> None:
    name = f"{WRAPPER}layers.1.mlp.gate.weight"
    width = {"I32": 4}.get(dtype, 1)
    tiny.tensors[name] = stored(tiny, dtype, (4, 160), np.zeros(640 * width, np.uint8))
    tiny.write()
    message = refusal(tiny, dst, UnsupportedError).message
    assert dtype in message
    assert name in message


@pytest.mark.parametrize("dtype", ["F32", "F16", "F64"])
def test_other_float_dtypes_are_read(tiny: Any, dst: Path, dtype: str) -> None:
    kind = {"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]
    for name in list(tiny.tensors):
        if name in tiny.truth:
            tensor = tiny.tensors[name]
            tiny.tensors.pop(f"{name}_scale_inv", None)
            tiny.tensors[name] = stored(tiny, dtype, tensor.shape, tiny.truth[name].astype(kind))
    tiny.write()
    assert convert(str(tiny.path), dst, ConvertOptions()).nbytes > 0


# -- FP8 scales


def test_fp8_without_its_scale(tiny: Any, dst: Path) -> None:
    del tiny.tensors[f"{EXPERT}_scale_inv"]
    tiny.write()
    assert f"{EXPERT}_scale_inv" in refusal(tiny, dst, InputError).message


def test_scale_without_its_weight(tiny: Any, dst: Path) -> None:
    del tiny.tensors[EXPERT]
    tiny.write()
    assert repr(EXPERT) in refusal(tiny, dst, InputError).message


def test_scale_beside_a_tensor_that_is_not_fp8(tiny: Any, dst: Path) -> None:
    tensor = tiny.tensors[EXPERT]
    tiny.tensors[EXPERT] = stored(tiny, "BF16", tensor.shape, np.zeros(tensor.shape, np.uint16))
    tiny.write()
    assert EXPERT in refusal(tiny, dst, InputError).message


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((1,), UnsupportedError),
        ((1, 1), UnsupportedError),
        ((), UnsupportedError),
        ((2, 3), InputError),
        ((4,), InputError),
    ],
)
def test_scale_grids_that_cannot_fit(tiny: Any, dst: Path, shape: tuple[int, ...], kind: type[WasteError]) -> None:
    tiny.tensors[f"{DENSE}_scale_inv"] = stored(tiny, "F32", shape, np.ones(shape, np.float32))
    tiny.write()
    message = refusal(tiny, dst, kind).message
    assert f"{DENSE}_scale_inv" in message
    assert "[2, 2]" in message


def test_another_block_size_is_another_grid(tiny: Any, dst: Path) -> None:
    tiny.config["quantization_config"]["weight_block_size"] = [64, 64]
    tiny.write()
    assert "64 x 64" in refusal(tiny, dst, InputError).message


def test_nan_in_fp8_ends_the_conversion_by_name_and_place(tiny: Any, dst: Path) -> None:
    tensor = tiny.tensors[EXPERT]
    raw = bytearray(tensor.data)
    raw[7] = 0x7F
    tiny.tensors[EXPERT] = type(tensor)(tensor.dtype, tensor.shape, bytes(raw))
    tiny.write()
    with pytest.raises(InputError, match=r"NaN") as caught:
        convert(str(tiny.path), dst, ConvertOptions())
    assert EXPERT in caught.value.message
    assert "[0, 7]" in caught.value.message
    assert not (dst / "manifest.json").exists()


# -- files


def test_missing_shard(tiny: Any, dst: Path) -> None:
    gone = sorted(tiny.path.glob("*.safetensors"))[-1]
    gone.unlink()
    message = refusal(tiny, dst, InputError).message
    assert gone.name in message
    assert "incomplete" in message


@pytest.mark.parametrize("cut", [1, 1000, 10**9], ids=["one byte", "some", "all"])
def test_short_shard(tiny: Any, dst: Path, cut: int) -> None:
    shard = sorted(tiny.path.glob("*.safetensors"))[-1]
    data = shard.read_bytes()
    shard.write_bytes(data[: max(len(data) - cut, 0)])
    assert shard.name in refusal(tiny, dst, InputError).message


def test_shape_that_contradicts_the_bytes(tiny: Any, dst: Path) -> None:
    shard = sorted(tiny.path.glob("*.safetensors"))[0]
    raw = shard.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + length])
    name = next(n for n in head if n.endswith("weight") and len(head[n]["shape"]) == 2)
    head[name]["shape"][0] *= 2
    text = json.dumps(head).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert name in refusal(tiny, dst, InputError).message


@pytest.mark.parametrize("what", ["missing", "file", "empty", "container", "gguf"])
def test_sources_that_are_no_checkpoint(tmp_path: Path, dst: Path, original: Any, what: str) -> None:
    source = tmp_path / "source"
    if what == "file":
        source.write_text("x")
    elif what == "gguf":
        source = tmp_path / "model.gguf"
        source.write_bytes(b"GGUF")
    elif what == "empty":
        source.mkdir()
    elif what == "container":
        convert(str(original.path), source, ConvertOptions())
    with pytest.raises(InputError) as caught:
        convert(str(source), dst, ConvertOptions())
    assert source.name in caught.value.message
    assert not dst.exists()


def test_a_revision_is_for_hub_models(original: Any, dst: Path) -> None:
    with pytest.raises(UsageError, match="revision"):
        convert(str(original.path), dst, ConvertOptions(revision="main"))


# -- tokenizer


def test_no_tokenizer(tiny: Any, dst: Path) -> None:
    (tiny.path / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(tiny, dst, InputError).message


def test_more_ids_than_rows(tiny: Any, dst: Path) -> None:
    last = tiny.tokenizer["added_tokens"][-1]
    for i in range(last["id"] + 1, 321):
        tiny.tokenizer["added_tokens"].append({**last, "id": i, "content": f"<|more {i}|>"})
    tiny.write()
    message = refusal(tiny, dst, InputError).message
    assert "ids up to 320" in message
    assert "320 rows" in message
    tiny.tokenizer["added_tokens"].pop()
    tiny.write()
    convert(str(tiny.path), dst, ConvertOptions())


def test_more_rows_than_ids_is_usual(tiny: Any, dst: Path) -> None:
    assert len(tiny.tokenizer["model"]["vocab"]) + len(tiny.tokenizer["added_tokens"]) < 320
    convert(str(tiny.path), dst, ConvertOptions())


def test_a_tokenizer_that_would_encode_otherwise_is_refused(
    tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*_args: object, **_options: object) -> int:
        raise InputError("tokenizer: 'x' encodes to [1], the tokenizers library says [2]")

    monkeypatch.setattr("waste.convert.texts.compare_with_hf", differ)
    assert "tokenizers library" in refusal(tiny, dst, InputError).message


def test_merges_out_of_order_are_refused(tiny: Any, dst: Path) -> None:
    tiny.tokenizer["model"]["merges"][0:2] = reversed(tiny.tokenizer["model"]["merges"][0:2])
    tiny.write()
    assert "merge" in refusal(tiny, dst, UnsupportedError).message.lower()


def test_template_sources(tiny: Any, tmp_path: Path) -> None:
    for i, (file, inline, expected) in enumerate(
        [
            ("FILE", "INLINE", "FILE"),
            (None, "INLINE", "INLINE"),
            (None, [{"name": "default", "template": "N"}], "N"),
            (None, None, None),
        ]
    ):
        (tiny.path / "chat_template.jinja").unlink(missing_ok=True)
        if file is not None:
            (tiny.path / "chat_template.jinja").write_text(file)
        (tiny.path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
        target = tmp_path / f"{i}.waste"
        result = convert(str(tiny.path), target, ConvertOptions())
        path = target / "chat_template.jinja"
        assert (path.read_text() if path.exists() else None) == expected
        assert any("no chat template" in notice for notice in result.notices) == (expected is None)


def test_broken_template(tiny: Any, dst: Path) -> None:
    (tiny.path / "chat_template.jinja").write_text("{% for m in messages %}")
    refusal(tiny, dst, InputError)


# -- all at once


def test_every_refusal_is_one_line(tiny: Any, dst: Path, tmp_path: Path, files_of: Callable[..., Any]) -> None:
    """A name with a newline in it must not break the line."""
    odd = f"{WRAPPER}layers.1.\nmlp"
    tiny.tensors[odd] = stored(tiny, "F32", (1,), np.zeros(1, np.float32))
    tiny.write()
    plan = plan_conversion(str(tiny.path), dst, ConvertOptions())
    assert plan.unused == (odd,)
    assert all("\n" not in notice for notice in plan.notices)


def test_threads_beyond_the_cores_save_no_time(tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waste.convert.preflight._encode_rate", lambda fmt: 1e6)
    monkeypatch.setattr("waste.convert.conversion.default_threads", lambda: 2)
    one, two, many, unsaid = (
        plan_conversion(str(tiny.path), dst, ConvertOptions(threads=threads)).seconds for threads in (1, 2, 1000, None)
    )
    assert one > two == many == unsaid
