"""A loaded model: a container opened, its trunk in memory, an expert cache beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from waste.backends.base import Ops
from waste.chat.format import JSON as CHAT_FILE
from waste.chat.format import ChatFormat
from waste.chat.format import from_json as read_chat
from waste.container.load import LoadReport
from waste.container.manifest import Manifest
from waste.container.reader import Bank, Container
from waste.engine.budget import context_tokens, ram_bytes, tier_budget
from waste.engine.relief import Relief
from waste.engine.session import Session
from waste.engine.trunk import Trunk
from waste.errors import UsageError
from waste.events import OnEvent, ignore
from waste.hardware import memory
from waste.hardware.pressure import PressureWatch
from waste.kvcache.store import StateWriter
from waste.models.config import ModelConfig
from waste.models.model import Model
from waste.models.stored import stored_config
from waste.planner.footprint import PREFILL_CHUNK, Budget, divide
from waste.tiers.build import TierBudget, build
from waste.tiers.options import TierOptions
from waste.tiers.usage import FILE as USAGE_FILE
from waste.tiers.usage import Usage
from waste.tokenizer import Tokenizer, from_files

if TYPE_CHECKING:
    from waste.generate import Generation

BACKENDS = ("cpu", "reference")

TEMPLATE_FILE = "chat_template.jinja"


class Engine:
    """A model ready to evaluate. Use `Engine.open`; close it, or use it as a context manager."""

    def __init__(
        self,
        container: Container,
        tokenizer: Tokenizer,
        trunk: Trunk,
        model: Model,
        budget: Budget,
        tier_budget: TierBudget,
        context: int,
        tiers: TierOptions,
        load_s: float,
        on_event: OnEvent,
        parent: Engine | None = None,
    ) -> None:
        """parent: the engine whose trunk this one shares, and its open banks where both read them in the same way."""
        self.container = container
        self.tokenizer = tokenizer
        self.model = model
        self.budget = budget
        self.tier_budget = tier_budget
        self.context = context  # tokens a session can hold
        self.tiers = tiers
        self.load_s = load_s  # from the call of `open` until a prompt could be evaluated
        self._trunk = trunk
        self._on_event = on_event
        self._siblings: list[Engine] = []
        self._closed = False
        self._parent = parent
        self.not_learned: str | None = None  # after closing: why usage.json could not be updated
        router = model.config.router
        # Two descriptors a layer: 84 for GLM-5.3-Flash, and many systems allow a process 1,024.
        self._shares_banks = parent is not None and parent.tiers.direct == tiers.direct
        self.banks: dict[int, Bank] = {}
        relief = Relief(PressureWatch(), on_event)
        try:
            if parent is not None and self._shares_banks:
                self.banks = parent.banks
            else:
                for layer in model.config.moe_layers:
                    self.banks[layer] = container.bank(layer, direct=tiers.direct, on_event=on_event)
            self.cache = build(
                self.banks,
                tier_budget,
                tiers,
                experts=router.experts,
                top_k=router.top_k,
                usage=Usage.load(self._usage_file, tuple(self.banks), router.experts) if tiers.learn else None,
                between_tokens=relief.check,
                on_event=on_event,
            )
        except BaseException:
            self._close_banks()
            raise

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        ram: str | int | None = None,
        vram: str | int | None = None,
        backend: str = "cpu",
        threads: int | None = None,
        ctx: int | None = None,
        experts_dirs: Sequence[str | os.PathLike[str]] = (),
        tiers: TierOptions | None = None,
        on_event: OnEvent = ignore,
    ) -> Engine:
        """Open the container at `path` and load its trunk.

        ram: the whole budget of this process, bytes or "4GiB"; default 72 % of the memory that is free.
        vram: of it, what a faster tier takes (until there is a GPU backend); default none.
        ctx: tokens a session can hold; default 8,192, never more than the model's own limit.
        threads: default one for each core this process may use. (`reference`: torch's own default, process-wide.)
        experts_dirs: where banks may lie that are not in the container: other drives.
        Raises InputError (missing or damaged container), ResourceError (budget too small), UsageError.
        """
        began = time.perf_counter()
        tiers = tiers or TierOptions()
        ops = _ops(backend, threads)
        container = Container.open(Path(path), [Path(directory) for directory in experts_dirs])
        config = stored_config(container.manifest)
        context = context_tokens(ctx, config, on_event)
        # Before the budget is divided: a vocabulary of 150,000 takes tens of megabytes that count as baseline.
        tokenizer = from_files(container.read_file("tokenizer.model"), container.read_file("tokenizer.json"))
        wanted, most = ram_bytes(ram, on_event), memory.detect().most_bytes
        budget = divide(config, container.manifest, wanted, context, memory.resident_bytes(), most=most)
        shares = tier_budget(budget, vram, config.router.top_k, on_event)
        trunk = Trunk(container, config, tiers, on_event)
        try:
            model = trunk.model(ops)
            load_s = time.perf_counter() - began
            return Engine(container, tokenizer, trunk, model, budget, shares, context, tiers, load_s, on_event)
        except BaseException:
            trunk.close()
            raise

    def sibling(
        self,
        *,
        ram: str | int | None = None,
        vram: str | int | None = None,
        threads: int | None = None,
        tiers: TierOptions | None = None,
    ) -> Engine:
        """Another engine on the same trunk in memory, with a cache of its own: to compare settings in one process.

        What is not given is as here. It is closed with this one, if not before. WasteError once this one is closed.
        """
        self.cache.refuse_closed()
        ops = self.model.ops if threads is None else _ops(self.model.ops.name, threads)
        wanted = self.budget.ram_bytes if ram is None else ram_bytes(ram, self._on_event)
        budget = divide(self.config, self.manifest, wanted, self.context, self.budget.baseline_bytes)
        shares = tier_budget(
            budget, self.tier_budget.vram_bytes if vram is None else vram, self.config.router.top_k, self._on_event
        )
        model = self.model if threads is None else self._trunk.model(ops)
        sibling = Engine(
            self.container,
            self.tokenizer,
            self._trunk,
            model,
            budget,
            shares,
            self.context,
            tiers or self.tiers,
            self.load_s,
            self._on_event,
            parent=self,
        )
        self._siblings.append(sibling)
        return sibling

    @property
    def _usage_file(self) -> Path:
        return self.container.path / USAGE_FILE

    def _used(self) -> Usage:
        """What this engine's sessions asked for."""
        usage = Usage(tuple(self.banks), self.config.router.experts)
        for layer, counts in self.cache.counts.items():
            usage.counts[layer] += counts
        return usage

    @property
    def load(self) -> LoadReport:
        """How the trunk came into memory."""
        return self._trunk.report

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def manifest(self) -> Manifest:
        return self.container.manifest

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        return frozenset(self.manifest.stop_ids)

    @cached_property
    def chat(self) -> ChatFormat:
        """How the model chats. A model without a template has a format that says so when it is used."""
        names = {entry.name for entry in self.manifest.files}
        template = self.container.read_file(TEMPLATE_FILE).decode() if TEMPLATE_FILE in names else None
        return read_chat(self.container.read_file(CHAT_FILE), template)

    def session(self, *, chunk: int = PREFILL_CHUNK) -> Session:
        """A new, empty timeline. `chunk`: tokens per prefill pass; it changes speed, not results."""
        return Session(self.model, self.cache, self.context, chunk=chunk)

    def restore(
        self, path: str | os.PathLike[str], ids: Sequence[int] | None = None, *, on_event: OnEvent = ignore
    ) -> Session:
        """A session as it was saved at `path`: at the longest of its checkpoints that `ids` begins with.

        Empty where `ids` begins with none of them; without `ids`, at the last one. `Session.sync(ids)` goes on.
        Raises InputError for a file that is missing, damaged or of another model, UsageError when the context is
        smaller than what was saved, naming what is needed.
        """
        session = self.session()
        session.restore(Path(path), self.digest, ids, on_event=on_event)
        return session

    def saving(self, path: str | os.PathLike[str]) -> StateWriter:
        """A session file to be written: `with engine.saving(p) as f: session.checkpoint(f); f.publish()`.

        What is at `path` stays until `publish`. Raises ResourceError where it cannot be written.
        """
        return StateWriter(Path(path), self.digest)

    @cached_property
    def digest(self) -> int:
        """What session files know the model by, 64 bits."""
        return self.manifest.weights_digest()

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        system: str | None = None,
        raw: bool = False,
    ) -> Generation:
        """Answer one prompt on a new session; `waste.generate` has the long form (streaming, stop strings, ...).

        raw: go on with the prompt's text instead of asking it in the model's chat format.
        """
        from waste.engine.sampling import SamplingParams
        from waste.generate import chat_prompt, generate, raw_prompt

        question = raw_prompt(self, prompt) if raw else chat_prompt(self, prompt, system=system)
        sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        return generate(self, question, sampling=sampling, max_tokens=max_tokens)

    def close(self) -> None:
        """Stop the readers, write down what was used, close all files. Sessions and siblings end with it."""
        for sibling in list(self._siblings):
            sibling.close()
        self.cache.close()
        # Not once more in a forked process: what was used is counted where it was used.
        if self.tiers.learn and not self._closed and self.cache.of_this_process:
            self.not_learned = self._used().merge_into(self._usage_file)
        self._closed = True
        self._close_banks()
        if self._parent is None:
            self._trunk.close()
        elif self in self._parent._siblings:
            self._parent._siblings.remove(self)  # with it go the slots of its cache

    def _close_banks(self) -> None:
        if not self._shares_banks:
            for bank in self.banks.values():
                bank.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _ops(backend: str, threads: int | None) -> Ops:
    """Backends are imported here: torch alone takes a second."""
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}, at least 1 is needed")
    if backend == "cpu":
        from waste.backends.cpu import CpuOps

        return CpuOps(threads=threads or len(os.sched_getaffinity(0)))
    if backend == "reference":
        import torch

        from waste.backends.reference import ReferenceOps

        if threads is not None:
            torch.set_num_threads(threads)

        return ReferenceOps()
    raise UsageError(f"unknown backend {backend!r}", hint=f"one of {', '.join(BACKENDS)}")
