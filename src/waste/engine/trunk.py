"""The trunk of a container in memory, once, whatever runs on it."""

from __future__ import annotations

from waste.backends.base import Ops
from waste.container.load import LoadReport
from waste.container.reader import Container
from waste.events import OnEvent
from waste.io.throttle import Throttle
from waste.models.config import ModelConfig
from waste.models.embedding import open_streamed
from waste.models.model import Model, TrunkTensors
from waste.models.spec import EMBEDDING, TRUNK_FILE
from waste.tiers.options import TierOptions


class Trunk:
    """All weights but routed experts; an embedding that nothing but look-ups needs stays on disk."""

    def __init__(self, container: Container, config: ModelConfig, tiers: TierOptions, on_event: OnEvent) -> None:
        """Reads and verifies it. InputError for damage, ResourceError when there is no memory for it."""
        rate = tiers.drive_bytes_per_s
        self._config = config
        self._entries = {entry.name: entry for entry in container.manifest.tensors_of(TRUNK_FILE)}
        self._streamed = open_streamed(container, config)
        loaded = container.load(
            TRUNK_FILE,
            on_event,
            skip=() if self._streamed is None else (EMBEDDING,),
            direct=tiers.direct,
            limit=None if rate is None else Throttle(rate),
        )
        self._tensors = loaded.tensors
        self.report: LoadReport = loaded.report

    def model(self, ops: Ops) -> Model:
        """The layers over these weights, for one backend. Copies nothing where the backend does not."""
        return Model(self._config, ops, TrunkTensors(self._config, ops, self._entries, self._tensors), self._streamed)

    def close(self) -> None:
        if self._streamed is not None:
            self._streamed.close()
