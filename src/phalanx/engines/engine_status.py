"""How an engine stands, told to those who watch: `phalanx top`, traces, the cluster's metrics."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable

from phalanx.declare.context import WorkerContext
from phalanx.engines.engine_types import EngineStatistics
from phalanx.engines.meter import IDLE_S
from phalanx.tracing.spans import process

__all__ = ["StatusReporter"]


class StatusReporter:
    """Of the engine of a rank; ``statistics`` gives those of now."""

    def __init__(self, context: WorkerContext, statistics: Callable[[], EngineStatistics]) -> None:
        self._context = context
        self._statistics = statistics
        self._later: asyncio.TimerHandle | None = None
        self._warned: set[str] = set()

    def tell(self) -> None:
        """Say how it stands. Nobody asks the rank for it."""
        context, statistics = self._context, self._statistics()
        if context.tell is not None:
            context.tell(statistics.line())
        rank = f"{context.group} rank {context.rank}"
        if process.count is not None:
            process.count(f"engine of {rank}", statistics.numbers())
        if context.measure is not None:
            context.measure("engine", rank, statistics.numbers())

    def rests(self) -> None:
        """Say so now, where there is nothing to do, and again when that was so for a while."""
        self.tell()
        if self._later is not None:
            self._later.cancel()
        self._later = asyncio.get_running_loop().call_later(IDLE_S, self.tell)

    def warn_of(self, what: str, call: str, why: str) -> None:
        """Warn once that a call does nothing here."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{call} does nothing here: {why}", stacklevel=3)
