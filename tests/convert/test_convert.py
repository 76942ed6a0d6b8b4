"""A container holds what its checkpoint means: every tensor, in its format, wherever and however it was converted."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from waste import quant
from waste.container.manifest import Manifest
from waste.container.reader import Container
from waste.container.verify import verify
from waste.convert import ConvertOptions, convert, plan_conversion
from waste.convert import encode as encode_module
from waste.errors import InputError, UsageError, WasteError
from waste.events import Event, Notice, Progress
from waste.kernels import isa
from waste.models.config import ModelConfig
from waste.models.formats import DEFAULT_EXPERTS, DEFAULT_TRUNK, TRUNK, read_formats
from waste.models.spec import TensorSpec, View, bank_layers, draft_specs, trunk_specs
from waste.tokenizer import from_files

WRAPPER = "model.language_model."
EXACT = ConvertOptions(experts="f32", trunk="f32")


def meaning(tiny: Any, spec: TensorSpec, config: ModelConfig) -> np.ndarray:
    """What `spec` should hold: float32 in its own shape, straight from the definition of its view."""
    name = spec.source if spec.source == "lm_head.weight" else WRAPPER + spec.source
    truth = tiny.truth[name]
    if spec.view is View.WHOLE:
        return truth.reshape(spec.shape)
    m = config.mla
    heads = truth.reshape(m.heads, m.nope + m.v, m.kv_lora)
    if spec.view is View.KEY_UP:
        rows = [heads[h, :, r][: m.nope] for h in range(m.heads) for r in range(m.kv_lora)]
    else:
        rows = [heads[h, m.nope + j] for h in range(m.heads) for j in range(m.v)]
    return np.stack(rows)


def stored(container: Container) -> dict[str, tuple[str, np.ndarray]]:
    """Every trunk and draft tensor of a container: (format, decoded)."""
    found = {}
    for file in container.manifest.tensor_files():
        blobs = container.load_tensors(file)
        for entry in container.manifest.tensors_of(file):
            rows, cols = entry.shape[0], int(np.prod(entry.shape[1:]))
            found[entry.name] = entry.fmt, quant.get(entry.fmt).decode(blobs[entry.name], rows, cols)
    return found


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("quantised", [True, False])
def test_exact_conversion_holds_every_weight(
    remake: Callable[..., Any], tmp_path: Path, dst: Path, seed: int, quantised: bool
) -> None:
    tiny = remake(tmp_path / "ckpt", seed=seed, quantised=quantised)
    convert(str(tiny.path), dst, EXACT)
    container = Container.open(dst)
    config = ModelConfig.from_json(container.manifest.config)
    found = stored(container)
    specs = [*trunk_specs(config), *draft_specs(config)]
    assert list(found) == [spec.name for spec in specs]
    for spec in specs:
        fmt, values = found[spec.name]
        assert fmt == "f32"
        np.testing.assert_array_equal(values.reshape(spec.shape), meaning(tiny, spec, config), err_msg=spec.name)
    for layer in bank_layers(config):
        with container.bank(layer) as bank:
            record = np.empty(bank.layout.stride, np.uint8)
            assert bank.experts == config.router.experts
            for expert in range(bank.experts):
                bank.read(expert, record)
                for part, section in zip(("gate", "up", "down"), bank.layout.sections, strict=True):
                    blob = record[section.offset : section.offset + section.nbytes]
                    values = quant.get(section.fmt).decode(blob, section.rows, section.cols)
                    name = f"{WRAPPER}layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                    np.testing.assert_array_equal(values, tiny.truth[name], err_msg=name)
    assert verify(container) == []


def test_absorbed_keys_and_values_give_the_same_attention(original: Any, dst: Path) -> None:
    """The law the two views exist for: scores and outputs from them equal those from kv_b itself."""
    convert(str(original.path), dst, EXACT)
    container = Container.open(dst)
    m = ModelConfig.from_json(container.manifest.config).mla
    found = stored(container)
    rng = np.random.default_rng(0)
    query, latent = rng.standard_normal((m.heads, m.nope)), rng.standard_normal(m.kv_lora)
    for layer in (1, 2):
        kv_b = original.truth[f"{WRAPPER}layers.{layer}.self_attn.kv_b_proj.weight"].astype(np.float64)
        kv = (kv_b @ latent).reshape(m.heads, m.nope + m.v)
        k_up = found[f"layers.{layer}.self_attn.k_up.weight"][1].reshape(m.heads, m.kv_lora, m.nope)
        v_up = found[f"layers.{layer}.self_attn.v_up.weight"][1].reshape(m.heads, m.v, m.kv_lora)
        scores = np.einsum("hrn,hn,r->h", k_up, query, latent)
        np.testing.assert_allclose(scores, (query * kv[:, : m.nope]).sum(1), rtol=1e-10)
        np.testing.assert_allclose(v_up @ latent, kv[:, m.nope :], rtol=1e-10)


def class_of(name: str) -> str | None:
    """The class of a tensor by its name, as a reader of the release would say; None for what is f32 always."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if re.fullmatch(r"embed_tokens|lm_head", leaf):
        return "table"
    if re.fullmatch(r"b_proj|wk|weights_proj|index_kpool_compress_gate", leaf):
        return "small"
    if re.match(r"layers\.0\.self_attn\.\w+_proj\.", name):
        return "first"
    if leaf == "wq_b":
        return "indexer"
    if "shared_experts" in name:
        return "shared"
    if leaf == "eh_proj" or name.startswith("layers.0.mlp."):
        return "dense"
    if re.fullmatch(r"\w+_proj|kv_a_proj_with_mqa|k_up|v_up", leaf):
        return "mla"
    return None


@pytest.mark.parametrize(
    ("experts", "trunk", "classes"),
    [
        ("q4", "q8", {}),
        ("q8", "bf16", {}),
        ("bf16", "q4", {"table": "q8"}),
        ("wt3", "q6", {"table": "q8"}),
        ("wt2+wt3", "wt4,first=q8,indexer=q6,shared=q4", {"table": "q8"}),
        ("f32", "f32,mla=wt3,indexer=q8,dense=wt2", {"small": "f32"}),
        ("wt4", "bf16,first=wt4,mla=q6,indexer=wt3,table=f32,small=f32", {}),
    ],
)
def test_formats_go_where_they_belong(
    original: Any, dst: Path, experts: str, trunk: str, classes: dict[str, str]
) -> None:
    convert(str(original.path), dst, ConvertOptions(experts=experts, trunk=trunk))
    container = Container.open(dst)
    manifest = container.manifest
    config = ModelConfig.from_json(manifest.config)
    inner, down = (experts.split("+") * 2)[:2]
    base, *others = trunk.split(",")
    wanted = dict.fromkeys(TRUNK, base) | {"small": "bf16"} | classes | dict(item.split("=") for item in others)
    assert manifest.formats == {"gate": inner, "up": inner, "down": down, **wanted}
    assert (manifest.options["experts"], read_formats(experts, manifest.options["trunk"])) == (
        experts,
        read_formats(experts, trunk),
    )
    found = stored(container)
    for spec in [*trunk_specs(config), *draft_specs(config)]:
        fmt, values = found[spec.name]
        name = class_of(spec.name)
        assert fmt == ("f32" if name is None else wanted[name]), spec.name
        weight = meaning(original, spec, config)
        rows, cols = weight.shape[0], int(np.prod(weight.shape[1:]))
        encoded = quant.get(fmt).encode(weight.reshape(rows, cols))
        np.testing.assert_array_equal(values, quant.get(fmt).decode(encoded, rows, cols), err_msg=spec.name)
    assert {class_of(name) for name in found} | {"kda", "kda_gate"} == {*TRUNK, None}  # its one KDA layer is the first
    for bank in manifest.banks:
        assert [section.fmt for section in bank.layout.sections] == [inner, inner, down]


def test_what_is_announced_is_what_is_written(original: Any, dst: Path) -> None:
    events: list[Event] = []
    plans = []
    plan = plan_conversion(str(original.path), dst, ConvertOptions(), events.append)
    assert events == []
    assert not dst.exists()
    result = convert(str(original.path), dst, ConvertOptions(), events.append, plans.append)
    assert result.nbytes == plan.write_bytes == sum(file.stat().st_size for file in dst.iterdir())
    assert [p.write_bytes for p in plans] == [plan.write_bytes]
    used = {name for name in original.tensors if ".visual." not in name}
    assert plan.tensors == len(used)
    assert plan.read_bytes == sum(len(original.tensors[name].data) for name in used)
    assert plan.weights == sum(original.truth[n].size for n in used if not n.endswith("_scale_inv"))
    assert set(plan.vision) == {name for name in original.tensors if ".visual." in name}
    assert (plan.unused, plan.copies, plan.finished) == ((), (), False)
    progress = [event for event in events if isinstance(event, Progress)]
    assert {event.phase for event in progress} == {"convert"}
    assert [event.done for event in progress] == sorted(event.done for event in progress)
    assert (progress[-1].done, progress[-1].total) == (plan.read_bytes, plan.read_bytes)
    assert (
        [event.message for event in events if isinstance(event, Notice)] == list(result.notices) == list(plan.notices)
    )
    assert any("vision" in notice for notice in plan.notices)


MIXED = {"experts": "wt2+wt3", "trunk": "wt4,first=q6,mla=q8,dense=q4,table=bf16"}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of the tiny model in pieces of 16 rows, so that there is something for threads to share."""
    monkeypatch.setattr("waste.io.dense._CHUNK_BYTES", 1)
    monkeypatch.setattr("waste.convert.encode._PIECE_WEIGHTS", 1)


def test_instruction_sets_and_threads_change_no_byte(
    original: Any, tmp_path: Path, files_of: Callable[[Path], dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    try:
        for name in isa.usable():
            isa.force(name)
            for threads in (1, 3):
                target = tmp_path / f"{name}-{threads}.waste"
                convert(str(original.path), target, ConvertOptions(threads=threads, **MIXED))
                found.append(files_of(target))
                monkeypatch.setattr("waste.io.dense._CHUNK_BYTES", 1)
                monkeypatch.setattr("waste.convert.encode._PIECE_WEIGHTS", 1)
    finally:
        isa.force(None)
    assert all(files == found[0] for files in found)


def test_result_does_not_depend_on_threads_or_place(
    original: Any,
    tmp_path: Path,
    clean: dict[str, bytes],
    files_of: Callable[[Path], dict[str, bytes]],
    small_pieces: None,
) -> None:
    for threads in (1, 2, 5):
        elsewhere = original.at(tmp_path / str(threads) / "deep" / original.path.name)
        target = tmp_path / f"{threads}.waste"
        convert(str(elsewhere.path), target, ConvertOptions(threads=threads))
        assert files_of(target) == clean
    assert not any(str(original.path.parent).encode() in data for data in clean.values())


def test_the_trunk_is_encoded_on_all_threads(original: Any, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trunk jobs wait for each other: with fewer threads, or one tensor at a time, they would wait for ever."""
    together = threading.Barrier(3, timeout=30)
    real = encode_module.encode
    left = 3

    def meeting(weight: Any, fmt: str, source: str) -> Any:
        nonlocal left
        if left > 0 and "experts" not in source:
            left -= 1
            together.wait()
        return real(weight, fmt, source)

    monkeypatch.setattr(encode_module, "encode", meeting)
    convert(str(original.path), dst, ConvertOptions(threads=3))
    assert left == 0


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_broken_tensor_is_named_whatever_the_threads(tiny: Any, dst: Path, threads: int) -> None:
    """The third tensor cannot be encoded, the fourth cannot even be read."""
    names = [f"{WRAPPER}layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    for name, value in zip(names[1:], (1e30, np.nan), strict=True):
        shape = tiny.tensors[name].shape
        tiny.tensors[name] = type(tiny.tensors[name])("F32", shape, np.full(shape, value, np.float32).tobytes())
    tiny.write()
    with pytest.raises(InputError, match=r"k_proj"):
        convert(str(tiny.path), dst, ConvertOptions(threads=threads))


def test_manifest_says_where_it_comes_from(original: Any, dst: Path) -> None:
    """Digests recomputed here from the definition in `waste.convert.provenance`."""
    convert(str(original.path), dst, ConvertOptions())
    manifest = Manifest.from_bytes((dst / "manifest.json").read_bytes(), "manifest.json")
    assert manifest.options == {"experts": DEFAULT_EXPERTS, "trunk": DEFAULT_TRUNK}
    assert manifest.architecture == "glm5_next"
    assert manifest.stop_ids == (261, 265)
    assert manifest.provenance["source"] == "local"
    assert manifest.provenance["name"] == "ckpt"
    assert manifest.provenance["revision"] is None
    index = json.loads((original.path / "model.safetensors.index.json").read_text())["weight_map"]
    by_name = {file["name"]: file for file in manifest.provenance["files"]}
    assert list(by_name) == sorted(by_name)
    for file, entry in by_name.items():
        data = (original.path / file).read_bytes()
        assert entry["nbytes"] == len(data)
        if not file.endswith(".safetensors"):
            assert entry["digest"] == f"{xxhash.xxh3_64_intdigest(data):016x}"
            continue
        lines = []
        for name in sorted(n for n, f in index.items() if f == file and ".visual." not in n):
            if name.endswith("_scale_inv"):
                continue
            scale = original.tensors.get(f"{name}_scale_inv")
            payload = original.tensors[name].data + (scale.data if scale else b"")
            lines.append(f"{name}:{xxhash.xxh3_64_intdigest(payload):016x}\n")
        assert entry["digest"] == f"{xxhash.xxh3_64_intdigest(''.join(lines).encode()):016x}"


def test_texts_come_along(tiny: Any, dst: Path, real_tokenizer_check: None) -> None:
    convert(str(tiny.path), dst, ConvertOptions())
    container = Container.open(dst)
    tokenizer = from_files(container.read_file("tokenizer.model"), container.read_file("tokenizer.json"))
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    for text in ("the <|user|> in there", "维生素C 12345\n\n", "x<think>y"):
        assert tokenizer.encode(text, markup=True) == library.encode(text, add_special_tokens=False).ids
    assert container.read_file("chat_template.jinja") == (tiny.path / "chat_template.jinja").read_bytes()
    assert json.loads(container.read_file("chat.json"))["think"] == ["<think>", "</think>"]
    assert container.read_file("generation_config.json") == (tiny.path / "generation_config.json").read_bytes()


# -- the same model in other files


def tensors_and_banks(path: Path) -> tuple[object, object]:
    manifest = Manifest.from_bytes((path / "manifest.json").read_bytes(), "manifest.json")
    return manifest.tensors, manifest.banks


@pytest.fixture
def reference(original: Any, tmp_path: Path) -> tuple[object, object]:
    convert(str(original.path), tmp_path / "reference.waste", ConvertOptions())
    return tensors_and_banks(tmp_path / "reference.waste")


@pytest.mark.parametrize("shards", [0, 1, 7])
def test_sharding_does_not_matter(tiny: Any, dst: Path, reference: object, shards: int) -> None:
    tiny.shards = shards
    tiny.write()
    convert(str(tiny.path), dst, ConvertOptions())
    assert tensors_and_banks(dst) == reference


def test_stray_files_are_not_read(tiny: Any, dst: Path, clean: dict[str, bytes], files_of: Any) -> None:
    shutil.copy(next(tiny.path.glob("*.safetensors")), tiny.path / "model.safetensors")
    (tiny.path / "adapter_model.safetensors").write_bytes(b"nonsense")
    (tiny.path / ".model-00003.safetensors.incomplete").write_bytes(b"\0" * 10)
    (tiny.path / "pytorch_model.bin").write_bytes(b"not a pickle")
    convert(str(tiny.path), dst, ConvertOptions())
    assert files_of(dst) == clean


@pytest.mark.parametrize("word", [{"torch_dtype": "float16"}, {"dtype": "torch.bfloat16"}, {"torch_dtype": None}])
def test_the_configs_word_on_dtypes_is_ignored(tiny: Any, dst: Path, reference: object, word: dict[str, Any]) -> None:
    tiny.text.update(word)
    tiny.write()
    convert(str(tiny.path), dst, ConvertOptions())
    assert tensors_and_banks(dst) == reference


def test_fp8_is_told_by_the_tensors(tiny: Any, dst: Path, reference: object) -> None:
    del tiny.config["quantization_config"]
    tiny.write()
    convert(str(tiny.path), dst, ConvertOptions())
    assert tensors_and_banks(dst) == reference


@pytest.mark.parametrize("wrapper", ["model.", "language_model.model.", ""])
def test_other_wrappers(tiny: Any, dst: Path, reference: object, wrapper: str) -> None:
    tiny.tensors = {name.replace(WRAPPER, wrapper): tensor for name, tensor in tiny.tensors.items()}
    tiny.write()
    convert(str(tiny.path), dst, ConvertOptions())
    assert tensors_and_banks(dst) == reference


def test_flat_config(tiny: Any, dst: Path, reference: object) -> None:
    tiny.config = {**tiny.text, "quantization_config": tiny.config["quantization_config"]}
    (tiny.path / "config.json").write_text(json.dumps(tiny.config))
    convert(str(tiny.path), dst, ConvertOptions())
    assert tensors_and_banks(dst) == reference


def test_config_with_byte_order_mark(tiny: Any, dst: Path, reference: object) -> None:
    path = tiny.path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    convert(str(tiny.path), dst, ConvertOptions())
    assert tensors_and_banks(dst) == reference


def test_the_strips_of_the_embedding_have_checksums(tiny: Any, dst: Path) -> None:
    convert(str(tiny.path), dst, ConvertOptions(threads=1))
    container = Container.open(dst)
    entry = next(entry for entry in container.manifest.tensors if entry.name == "embed_tokens.weight")
    data = (dst / "trunk.bin").read_bytes()[entry.offset :][: entry.nbytes + -entry.nbytes % 64]
    width = quant.get(entry.fmt).nbytes(16, entry.shape[1])
    count = -(-entry.shape[0] // 16)
    strips = [data[i * width : (i + 1) * width if i + 1 < count else None] for i in range(count)]
    assert container.read_file("embed_tokens.sums") == b"".join(xxhash.xxh3_64_digest(s)[::-1] for s in strips)
    assert verify(container) == []


def test_tied_embeddings(tiny: Any, tmp_path: Path) -> None:
    for carries_head in (True, False):
        target = tmp_path / f"{carries_head}.waste"
        tiny.config["tie_word_embeddings"] = tiny.text["tie_word_embeddings"] = True
        if not carries_head:
            del tiny.tensors["lm_head.weight"]
        tiny.write()
        result = convert(str(tiny.path), target, ConvertOptions())
        manifest = Container.open(target).manifest
        assert manifest.config["tie_word_embeddings"] is True
        assert "lm_head.weight" not in {entry.name for entry in manifest.tensors}
        assert any("lm_head.weight" in notice for notice in result.notices) == carries_head
        assert not (target / "embed_tokens.sums").exists()  # the head reads all of it
        assert result.nbytes == sum(file.stat().st_size for file in target.iterdir())


def test_without_draft_layer(tiny: Any, dst: Path) -> None:
    tiny.tensors = {name: t for name, t in tiny.tensors.items() if ".layers.2." not in name}
    tiny.write()
    result = convert(str(tiny.path), dst, ConvertOptions())
    manifest = Container.open(dst).manifest
    assert manifest.config["draft_layers"] == 0
    assert [bank.layer for bank in manifest.banks] == [1]
    assert not (dst / "draft.bin").exists()
    assert any("num_nextn_predict_layers" in notice for notice in result.notices)


def test_extra_tensors_are_listed_not_read(tiny: Any, dst: Path, reference: object) -> None:
    stored_type = type(next(iter(tiny.tensors.values())))
    tiny.tensors["model.empty"] = stored_type("BF16", (4, 0), b"")
    tiny.tensors["model.scalar"] = stored_type("F32", (), b"\0\0\x80?")
    tiny.tensors["scaled_fp8"] = stored_type("F32", (0,), b"")
    tiny.tensors[f"{WRAPPER}layers.2.embed_tokens.weight"] = tiny.tensors[f"{WRAPPER}embed_tokens.weight"]
    tiny.write()
    plan = plan_conversion(str(tiny.path), dst, ConvertOptions())
    assert set(plan.unused) == {"model.empty", "model.scalar", "scaled_fp8"}
    assert plan.copies == (f"{WRAPPER}layers.2.embed_tokens.weight",)
    convert(str(tiny.path), dst, ConvertOptions())
    assert tensors_and_banks(dst) == reference


@pytest.mark.parametrize(
    "name",
    ["with space", "quo'te\"s", "模型 Ünïcödé é", "-rf", "a" * 200, "new\nline", "{braces}%s$HOME", "trailing."],
)
def test_odd_paths(original: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    shutil.copytree(original.path, tmp_path / name / "ckpt")
    monkeypatch.chdir(tmp_path)
    convert(f"{name}/ckpt", Path(name) / "out.waste", ConvertOptions())
    assert convert(str(tmp_path / name / "ckpt"), tmp_path / name / "out.waste", ConvertOptions()).unchanged
    Container.open(tmp_path / name / "out.waste")
    shutil.rmtree(tmp_path / name / "ckpt")
    with pytest.raises(WasteError) as caught:
        convert(f"{name}/ckpt/not there", Path("other"), ConvertOptions())
    assert "\n" not in caught.value.message


# -- options


@pytest.mark.parametrize("bad", [{"experts": "q5"}, {"trunk": ""}, {"threads": 0}, {"threads": -2}])
def test_options_are_checked_when_made(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ConvertOptions(**bad)


def test_weights_too_large_for_a_format_name_the_tensor(tiny: Any, dst: Path) -> None:
    name = f"{WRAPPER}layers.0.self_attn.q_proj.weight"
    rows, cols = tiny.tensors[name].shape
    huge = np.full((rows, cols), 1e30, np.float32)
    tiny.tensors[name] = type(tiny.tensors[name])("F32", (rows, cols), huge.tobytes())
    tiny.write()
    with pytest.raises(InputError, match=r"q_proj") as caught:
        convert(str(tiny.path), dst, ConvertOptions())
    assert caught.value.hint is not None
    assert not (dst / "manifest.json").exists()
