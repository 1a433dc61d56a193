"""What some ranks gather until somebody ends it: profiles and recordings."""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.runtime.groups.ask import Asked, ask
from phalanx.runtime.groups.core import GroupCore
from phalanx.wire.value import Value

if TYPE_CHECKING:
    from typing_extensions import Self

REFUSED_WITHIN_S = 1.0


class Capture(ABC):
    """Under way until it is ended: once, by whoever asks first, or before the ranks' processes end.

    As a context manager it ends with the block, also with one that raises.
    """

    verb: ClassVar[str]
    lost_with_rank: ClassVar[str]
    after_error_s: ClassVar[float]

    def __init__(self, core: GroupCore, ranks: Sequence[int]) -> None:
        self._core = core
        self._ranks = tuple(ranks)
        self._epoch = core.epoch
        self._key = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._over = False
        self._notes: list[str] = []

    def _begin(self, arm: Callable[..., Any], end: Callable[..., Any], order: Value) -> None:
        """Have the ranks begin; if one refuses, none does."""
        armed = ask(self._core, self.verb, self._ranks, arm, self._key, order)
        self._core.life.before_end.append(self._end)
        try:
            armed.check(REFUSED_WITHIN_S)
        except BaseException:
            self._core.life.before_end.remove(self._end)
            ask(self._core, self.verb, self._ranks, end, self._key)  # those that did not refuse
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """What went otherwise than asked for, and why: calls that raised, ranks that gave nothing."""
        return tuple(self._notes)

    def _end(self, timeout: float | None) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            core = self._core
            if self._end in core.life.before_end:
                core.life.before_end.remove(self._end)
            if core.endpoints:  # else those that it knows are about to end, and there are no others yet
                self._epoch = core.epoch
            there = self._epoch.endpoints
            alive = [rank for rank in self._ranks if rank < len(there) and core.transport.alive(there[rank])]
            gone = [rank for rank in self._ranks if rank not in alive]
            self._notes += [f"rank {rank} is gone, and {self.lost_with_rank} with it" for rank in gone]
            if alive:
                self._fetch(alive, timeout)

    def _ended_on(self, ranks: Sequence[int], end: Callable[..., Any]) -> Asked:
        """Have ranks end, and say what they have gathered."""
        return ask(self._core, self.verb, ranks, end, self._key, epoch=self._epoch)

    @abstractmethod
    def _fetch(self, ranks: Sequence[int], timeout: float | None) -> None:
        """Take what the ranks have gathered."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(None if error is None else self.after_error_s)
