"""A loaded model: a container opened, its trunk in memory, an expert cache beside it."""

from __future__ import annotations

import os
import time
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from waste.backends.base import Ops
from waste.chat.format import JSON as CHAT_FILE
from waste.chat.format import ChatFormat
from waste.chat.format import from_json as read_chat
from waste.container.manifest import Manifest
from waste.container.reader import Bank, Container
from waste.engine.session import Session
from waste.errors import ResourceError, UsageError
from waste.events import Notice, OnEvent, ignore
from waste.hardware import memory
from waste.models.config import ModelConfig
from waste.models.model import Model, TrunkTensors
from waste.models.spec import TRUNK_FILE
from waste.models.stored import stored_config
from waste.planner.footprint import HEALTHY_SHARE, PREFILL_CHUNK, Budget, divide
from waste.tiers.cache import ExpertCache
from waste.tokenizer import Tokenizer, from_files
from waste.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from waste.generate import Generation

BACKENDS = ("cpu", "reference")

TEMPLATE_FILE = "chat_template.jinja"

# A session's token limit unless asked otherwise: long enough for a report, short enough that its caches
# do not crowd out experts. The model's own limit may be a million.
DEFAULT_CONTEXT = 8192


class Engine:
    """A model ready to evaluate. Use `Engine.open`; close it, or use it as a context manager."""

    def __init__(
        self,
        container: Container,
        tokenizer: Tokenizer,
        model: Model,
        banks: dict[int, Bank],
        budget: Budget,
        context: int,
        load_s: float,
    ) -> None:
        self.container = container
        self.tokenizer = tokenizer
        self.model = model
        self.banks = banks  # by layer
        self.cache = ExpertCache(banks, budget.slots)
        self.budget = budget
        self.context = context  # tokens a session can hold
        self.load_s = load_s

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        ram: str | int | None = None,
        backend: str = "cpu",
        threads: int | None = None,
        ctx: int | None = None,
        on_event: OnEvent = ignore,
    ) -> Engine:
        """Open the container at `path` and load its trunk.

        ram: the whole budget of this process, bytes or "4GiB"; default 72 % of the memory that is free.
        ctx: tokens a session can hold; default 8,192, never more than the model's own limit.
        threads: default one for each core this process may use. (`reference`: torch's own default, process-wide.)
        Raises InputError (missing or damaged container), ResourceError (budget too small), UsageError.
        """
        began = time.perf_counter()
        ops = _ops(backend, threads)
        container = Container.open(Path(path))
        config = stored_config(container.manifest)
        context = _context(ctx, config, on_event)
        # Before the budget is divided: a vocabulary of 150,000 takes tens of megabytes that count as baseline.
        tokenizer = from_files(container.read_file("tokenizer.model"), container.read_file("tokenizer.json"))
        budget = divide(config, container.manifest, _ram(ram, on_event), context, memory.resident_bytes())
        blobs = container.load_tensors(TRUNK_FILE, on_event)
        entries = {entry.name: entry for entry in container.manifest.tensors_of(TRUNK_FILE)}
        model = Model(config, ops, TrunkTensors(config, ops, entries, blobs))
        banks = {layer: container.bank(layer) for layer in config.moe_layers}
        return Engine(container, tokenizer, model, banks, budget, context, time.perf_counter() - began)

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
        """Stop the readers and close the banks. Sessions of this engine end with it."""
        self.cache.close()
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


def _context(ctx: int | None, config: ModelConfig, on_event: OnEvent) -> int:
    limit = config.max_position_embeddings
    if ctx is None:
        return min(DEFAULT_CONTEXT, limit)
    if ctx < 1:
        raise UsageError(f"ctx is {ctx}, at least 1 token is needed")
    if ctx > limit:
        on_event(Notice(f"context reduced to {limit} tokens, the model's own limit (asked for {ctx})"))
    return min(ctx, limit)


def _ram(ram: str | int | None, on_event: OnEvent) -> int:
    machine = memory.detect()
    most = machine.total_bytes if machine.limit_bytes is None else machine.limit_bytes
    healthy = int(HEALTHY_SHARE * machine.available_bytes) + memory.resident_bytes()
    if ram is None:
        return healthy
    wanted = parse_bytes(ram, name="ram") if isinstance(ram, str) else ram
    if wanted > most:
        owner = "this machine's" if machine.limit_bytes is None else "the control group's"
        raise ResourceError(
            f"a RAM budget of {format_bytes(wanted)} is more than {owner} {format_bytes(most)}",
            hint=f"--ram {healthy >> 20}MiB is healthy here",
        )
    if wanted > machine.available_bytes + memory.resident_bytes():
        free = format_bytes(machine.available_bytes)
        on_event(Notice(f"a RAM budget of {format_bytes(wanted)} is above the {free} now free"))
    return wanted
