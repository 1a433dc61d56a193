"""Versions that are staged beside what the targets do, and committed between their calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from phalanx.errors import DeclarationError, InternalError, WeightsError
from phalanx.execution.weights import questions
from phalanx.execution.weights.orders import Committed, Since, SyncOrder
from phalanx.runtime.calls.call import Call
from phalanx.runtime.links.pairing import Pair, PairOptions
from phalanx.runtime.links.pairs import Pairs
from phalanx.runtime.links.sides import WeightsSide, all_in_order, ask_each, send_to
from phalanx.runtime.links.sync_future import PairCalls, SyncFuture
from phalanx.runtime.links.versions import Version
from phalanx.transfer.planner import Plans

__all__ = ["Stages"]


class _Staged(NamedTuple):
    number: int
    future: SyncFuture
    pairs: tuple[Pair, ...]


class _Commit(SyncFuture):
    """The targets' part of a commit: gives the staged version, with what the slowest rank took for it."""

    def __init__(
        self,
        staged: _Staged,
        calls: Sequence[Call],
        version: Version,
        text: str,
        on_end: Callable[[Version | BaseException], None],
        lock: threading.RLock,
    ) -> None:
        parts = [PairCalls(pair, None, (call,)) for pair, call in zip(staged.pairs, calls, strict=True)]
        super().__init__(parts, staged.number, time.monotonic(), text, on_end, lock)
        self._staged = version

    def _version(self, timeout: float | None) -> Version:
        self._wait_for_all(timeout)
        answers: list[list[Committed]] = [call.result(None) for call in self._all]
        seconds = max(one.seconds for ranks in answers for one in ranks)
        return replace(self._staged, commit_seconds=seconds)


class Stages:
    """Of one sync: its pairs, whose targets receive on threads, and the version that was staged last.

    Not for several threads; ``begin``, ``commit``, ``drop`` and ``part`` are made under the lock of the sync.
    """

    def __init__(
        self,
        source: WeightsSide,
        targets: Sequence[WeightsSide],
        plans: Plans,
        options: PairOptions,
        name: str,
        lock: threading.RLock,
    ) -> None:
        self._source = source
        self._options = options
        self._name = name
        self.pairs = Pairs(source, targets, plans, options)
        self._staged: _Staged | None = None
        self._unused: int | None = None
        self._lock = lock

    def begin(
        self,
        numbered: Callable[[Sequence[Pair], int | None], int],
        step: int | None,
        since: Since,
        on_version: Callable[[Version], None],
    ) -> SyncFuture:
        """Send a version to the threads of the targets.

        Args:
            numbered: gives it a number, which may be that of the last one that failed, if nobody has begun with it.
            on_version: is told once all targets have it.
        """
        self.drop()
        while True:
            pairs = self.pairs.present()
            with all_in_order([self._source.core]):
                if all(pair.current for pair in pairs):
                    number, self._unused = numbered(pairs, self._unused), None
                    return self._send(pairs, number, step, since, on_version)

    def drop(self) -> None:
        """Something newer comes: what was staged is not to be committed any more."""
        staged, self._staged = self._staged, None
        if staged is not None and staged.future.done():
            staged.future.exception()  # of one that failed the ends are gone, which is noted with this

    def _send(
        self,
        pairs: Sequence[Pair],
        number: int,
        step: int | None,
        since: Since,
        on_version: Callable[[Version], None],
    ) -> SyncFuture:
        began = time.monotonic()
        staging = self._options.staged
        if staging is None:
            raise InternalError("stages were made for a sync that does not stage")
        sent: list[PairCalls] = []
        for pair in pairs:
            order = SyncOrder(pair.key, number, staging.verify, staging.timeout, step, since)
            title = f"weights {self._name!r}: staged"
            call = send_to(self._source.core, self._source.ranks, title, questions.stage, order)
            sent.append(PairCalls(pair, None, (call,)))

        def ended(outcome: Version | BaseException) -> None:
            if isinstance(outcome, Version):
                on_version(outcome)
            elif self.pairs.has(pairs):  # and not others, made since for the next stage
                self.part()
                self._unused = number

        text = f"in the stage of weights {self._name!r} from {self._source.title!r} to version {number}"
        future = SyncFuture(sent, number, began, text, ended, self._lock)
        self._staged = _Staged(number, future, tuple(pairs))
        return future

    def commit(self, on_version: Callable[[Version], None]) -> Version:
        """Have all targets take over what is staged. ``on_version`` is told when they have.

        Raises:
            DeclarationError, WeightsError: there is nothing that can be committed.
            As :meth:`SyncFuture.result`.
        """
        staged = self._staged
        if staged is None:
            raise DeclarationError(
                f"nothing of weights {self._name!r} is staged: call stage() first; a sync, a stage that failed and a "
                "commit leave nothing to commit"
            )
        version = staged.future.result()
        self._staged = None
        with all_in_order([pair.target.core for pair in staged.pairs]):
            if not all(pair.current for pair in staged.pairs):
                self.part()
                raise WeightsError(
                    f"version {staged.number} of weights {self._name!r} is not there any more: a group has other "
                    "processes than when it was staged; stage again, or sync"
                )
            calls = [self._committed(pair, staged.number) for pair in staged.pairs]

        def ended(outcome: Version | BaseException) -> None:
            if isinstance(outcome, Version):
                on_version(outcome)
            else:
                for pair in staged.pairs:
                    target = pair.target
                    ask_each(target.core, target.ranks, questions.tear, target.asked, staged.number)
                self.part()

        text = f"in the commit of version {staged.number} of weights {self._name!r}"
        return _Commit(staged, calls, version, text, ended, self._lock).result()

    def _committed(self, pair: Pair, number: int) -> Call:
        target = pair.target
        title = f"weights {self._name!r}: committed"
        target.core.life.had_weights.setdefault(target.key, number)  # now: nobody may ask before a restart
        return send_to(target.core, target.ranks, title, questions.commit, pair.key, number)

    def part(self) -> None:
        """Give everything back: what is staged is dropped."""
        self._staged = None
        self.pairs.part()
