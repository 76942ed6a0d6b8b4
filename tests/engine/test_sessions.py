"""Law 4: save, restore, continue equals never having stopped, bit for bit; and what a session refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint

from waste.convert import ConvertOptions, convert
from waste.engine.engine import Engine
from waste.engine.session import Session
from waste.errors import InputError, ResourceError, UsageError, WasteError

FAMILIES = {
    "glm5_next": ["--layers", "6", "--dense", "1"],
    "kimi_linear": ["--layers", "5"],
    "glm_moe_dsa": ["--layers", "5", "--dense", "1"],
    "deepseek_v3": ["--layers", "4"],
}
TOKENS = 44  # past what the index selects: selection is at work after a restore

# transformers warns of its own plans; they are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module", params=FAMILIES)
def container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_checkpoint.main([request.param, str(folder / "checkpoint"), *FAMILIES[request.param]])
    convert(str(folder / "checkpoint"), folder / "m.waste", ConvertOptions(experts="f32", trunk="f32"))
    return folder / "m.waste"


@pytest.fixture(scope="module", params=["cpu", "reference"])
def engines(request: pytest.FixtureRequest, container: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two that differ in all that must not matter: room for experts, context, threads."""
    with (
        Engine.open(container, ram="4GiB", ctx=TOKENS + 20, backend=request.param) as roomy,
        Engine.open(container, ram=_least(container), ctx=TOKENS, backend=request.param, threads=1) as tight,
    ):
        yield roomy, tight


def _least(container: Path) -> str:
    """A budget a little above the smallest that runs."""
    with pytest.raises(ResourceError) as refusal:
        Engine.open(container, ram=1 << 20)
    found = re.match(r"--ram (\d+)MiB", refusal.value.hint or "")
    assert found
    return f"{int(found[1]) + 32}MiB"


def go_on(session: Session, ids: np.ndarray, split: int) -> np.ndarray:
    """Logits of the rest: the first ones one by one, then all at once."""
    rows = [session.eval(ids[i : i + 1], all_logits=True) for i in range(split)]
    return np.concatenate([*rows, session.eval(ids[split:], all_logits=True)])


@pytest.mark.parametrize("seed", range(2))
def test_stopping_changes_no_bit(engines: tuple[Engine, Engine], tmp_path: Path, seed: int) -> None:
    first, other = engines if seed % 2 else engines[::-1]
    random = np.random.default_rng((seed, len(first.config.attention), first.config.vocab_size))
    ids = random.integers(0, first.config.vocab_size, TOKENS)
    stops = np.sort(random.choice(np.arange(1, TOKENS - 4), 3, replace=False)).tolist()
    split = int(random.integers(0, 3))

    with first.saving(tmp_path / "s.kv") as file:
        session = first.session()
        for begin, end in zip([0, *stops], stops, strict=False):
            session.eval(ids[begin:end])
            session.checkpoint(file)
            session.checkpoint(file)  # nothing new: nothing is added
        file.publish()
    reached = dict(zip(stops, [None] * len(stops), strict=True))
    for stop in stops:
        # Never stopped: the same calls, as prefill on `reference` is not bit for bit decode.
        straight, at = first.session(), 0
        for end in [s for s in stops if s <= stop]:
            straight.eval(ids[at:end])
            at = end
        reached[stop] = go_on(straight, ids[stop:], split)
    for engine in (first, other):
        for i, stop in enumerate(stops):
            wanted = ids[: stops[i + 1] - 1 if i + 1 < len(stops) else TOKENS]
            session = engine.restore(tmp_path / "s.kv", wanted.tolist())
            assert session.position == stop
            np.testing.assert_array_equal(session.ids, ids[:stop])
            np.testing.assert_array_equal(go_on(session, ids[stop:], split), reached[stop])
    assert first.restore(tmp_path / "s.kv").position == stops[-1]


def test_a_restored_session_can_be_saved_and_restored_again(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    first, other = engines
    ids = np.random.default_rng(7).integers(0, first.config.vocab_size, TOKENS).tolist()
    straight = first.session()
    for begin, end in ((0, 21), (21, 40), (40, 41)):
        expected = straight.eval(ids[begin:end])
    with first.saving(tmp_path / "s.kv") as file:
        session = first.session()
        session.eval(ids[:21])
        session.checkpoint(file)
        file.publish()
    with other.saving(tmp_path / "s.kv") as file:  # from and to the same file
        session = other.restore(tmp_path / "s.kv", ids)
        session.sync(ids[:40])
        session.checkpoint(file)
        file.publish()
    session = first.restore(tmp_path / "s.kv", ids)
    assert session.position == 40
    np.testing.assert_array_equal(session.sync(ids[:41]), expected)


def test_a_saved_prompt_needs_no_evaluation(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    engine = engines[0]
    ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, 19).tolist()
    session = engine.session()
    expected = session.eval(ids, all_logits=True)[-1]
    with engine.saving(tmp_path / "s.kv") as file:
        session.checkpoint(file)
        file.publish()
    before = engine.restore(tmp_path / "s.kv", ids)
    np.testing.assert_array_equal(before.sync(ids), expected)
    assert (before.stats.expert_hits, before.stats.expert_misses) == (0, 0)


def save(engine: Engine, ids: list[int], path: Path) -> None:
    session = engine.session()
    session.eval(ids)
    with engine.saving(path) as file:
        session.checkpoint(file)
        file.publish()


def test_another_backend_takes_over(exact_nano: Path, tmp_path: Path) -> None:
    ids = list(range(5, 105))
    with Engine.open(exact_nano, ram="4GiB") as cpu, Engine.open(exact_nano, ram="4GiB", backend="reference") as torch:
        for one, other in ((cpu, torch), (torch, cpu)):
            save(one, ids[:90], tmp_path / "s.kv")
            mixed = other.restore(tmp_path / "s.kv", ids).eval(ids[90:], all_logits=True)
            pure = other.session().eval(ids, all_logits=True)[90:]
            assert np.linalg.norm(mixed - pure) < 1e-4 * np.linalg.norm(pure)


def test_any_other_weights_are_another_model_and_nothing_else_is(
    exact_nano: Path, default_nano: Path, cpu_engine: Engine, tmp_path: Path
) -> None:
    save(cpu_engine, [5, 6, 7], tmp_path / "s.kv")
    with Engine.open(exact_nano, ram="4GiB") as other, pytest.raises(InputError, match="another model"):
        other.restore(tmp_path / "s.kv")
    manifest = cpu_engine.manifest
    same = replace(manifest, tool="9.9", provenance={"source": "elsewhere"}, options={}, files=())
    assert same.weights_digest() == manifest.weights_digest()
    bank, tensor = manifest.banks[0], manifest.tensors[0]
    for changed in (
        replace(manifest, banks=(replace(bank, digest=bank.digest ^ 1), *manifest.banks[1:])),
        replace(manifest, tensors=(replace(tensor, checksum=tensor.checksum ^ 1), *manifest.tensors[1:])),
        replace(manifest, config={**manifest.config, "rms_norm_eps": 1.0}),
    ):
        assert changed.weights_digest() != manifest.weights_digest()


def test_sync_goes_on_or_refuses(cpu_engine: Engine) -> None:
    session = cpu_engine.session()
    ids = [5, 6, 7, 8, 9]
    expected = cpu_engine.session().eval(ids)
    session.sync(ids[:2])
    np.testing.assert_array_equal(session.sync(ids), expected)
    logits = session.sync(ids)
    logits[:] = 0  # the caller's own
    np.testing.assert_array_equal(session.sync(np.array(ids)), expected)
    for wrong, common in (([5, 6, 1, 8, 9, 10], 2), ([5, 6], 2), ([], 0)):
        with pytest.raises(
            UsageError, match=f"holds 5 tokens, and the {len(wrong)} given differ from them after {common}"
        ):
            session.sync(wrong)
    np.testing.assert_array_equal(session.ids, ids)
    with pytest.raises(UsageError, match="at least one token"):
        cpu_engine.session().sync([])


def test_nothing_is_saved_of_an_empty_or_broken_session(cpu_engine: Engine, tmp_path: Path, monkeypatch: Any) -> None:
    session = cpu_engine.session()
    with cpu_engine.saving(tmp_path / "s.kv") as file:
        with pytest.raises(UsageError, match="empty"):
            session.checkpoint(file)
        session.eval([5, 6])
        with monkeypatch.context() as patch:
            patch.setattr(cpu_engine.model, "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.eval([7])
        for refused in (lambda: session.checkpoint(file), lambda: session.sync([5, 6]), lambda: session.eval([7])):
            with pytest.raises(WasteError, match="stopped"):
                refused()
    assert list(tmp_path.iterdir()) == []


def test_a_session_that_could_not_be_restored_is_of_no_use(cpu_engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    save(cpu_engine, [5, 6, 7], path)
    used = cpu_engine.session()
    used.eval([5])
    with pytest.raises(UsageError, match="only a new session"):
        used.restore(path, cpu_engine.digest)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    session = cpu_engine.session()
    with pytest.raises(InputError, match="damaged"):
        session.restore(path, cpu_engine.digest)
    with pytest.raises(WasteError, match="stopped"):
        session.eval([8])  # its state may hold anything
