"""A target rank's part of staged versions: a thread reads them beside what the rank does, a call takes them over.

The thread waits at the ends of this rank's movers, so that nothing has to be called here for a stage, which a long call
would hold up. It reads into a second set of tensors, compares digests, and answers each source. A source that is gone
ends it, and so does whoever closes the ends.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from typing import cast

import torch

from phalanx.errors import PhalanxError, WeightsLost
from phalanx.execution.weights.book import WeightsBook
from phalanx.execution.weights.ends import closed_by_errors, refreshed
from phalanx.execution.weights.orders import Arrived, Committed, JoinOrder, Staging, Takeover
from phalanx.execution.weights.shelf import RankShelf
from phalanx.execution.weights.takeover import spare_tensors, take_over, takeover
from phalanx.execution.weights.target import TargetRank, hand_over
from phalanx.movers.contract import StagingTarget
from phalanx.transfer.tensors import echo, write_slot

__all__ = ["StagedTarget"]

_LOOK_SECONDS = 0.25
"""Between two looks at whether the thread is to end, where nothing else wakes it."""
_END_SECONDS = 2.0


class StagedTarget(TargetRank):
    """Reads versions on a thread of its own, from when it is made until it is closed or a source is gone."""

    def __init__(
        self, book: WeightsBook, order: JoinOrder, index: int, shelf: RankShelf, staging: Staging
    ) -> None:
        super().__init__(book, order, index, shelf)
        self._staging = staging
        loads = book.accepted(self._key).load is not None
        self._spare = dict(self._reading.tensors) if loads else spare_tensors(self._reading)
        self._lock = threading.Lock()
        self._number: int | None = None
        self._failure: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="phalanx-staged-weights", daemon=True)
        if self._legs:
            self._thread.start()

    def _serve(self) -> None:
        """Read one version after another. An error ends it: its ends are of no use then."""
        try:
            while not self._ending.is_set():
                if self._begun():
                    self._stage()
        except BaseException as error:
            with self._lock:
                self._number, self._failure = None, error
        finally:
            super().close()

    def _begun(self) -> bool:
        """Whether a source sends, over whichever leg."""
        share = _LOOK_SECONDS / len(self._legs)
        return any(
            cast(StagingTarget, leg.end).begun(tuple(leg.buckets), timeout=share) for leg in self._legs
        )

    def _stage(self) -> None:
        with self._lock:
            self._number = None  # what was staged before is written over from here on
        try:
            began = time.perf_counter()
            number, nbytes, by_source = self._read()
            with self._lock:
                self._number = number
            self._answer(None, Arrived(nbytes, time.perf_counter() - began, by_source))
        except BaseException as error:
            with contextlib.suppress(PhalanxError, OSError, KeyError):  # who is gone hears nothing
                self._answer(f"{type(error).__name__}: {error}", None)
            raise

    def _read(self) -> tuple[int, int, tuple[tuple[int, str, int], ...]]:
        nbytes, by_source, notes = self._take(
            lambda slot: write_slot(self._spare, slot), self._staging.timeout
        )
        number = max(pickle.loads(note)[0] for note in notes.values())
        self._verify(number, self._staging.verify, self._spare, notes)
        echo(self._plan, self._spare)
        for device in {one.device for one in self._spare.values() if one.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return number, nbytes, by_source

    def _answer(self, why: str | None, arrived: Arrived | None) -> None:
        """Tell all sources that this rank has a version, or why it has not."""
        text = pickle.dumps((why, arrived), 5)
        for leg in self._legs:
            cast(StagingTarget, leg.end).answer(tuple(leg.buckets), text)

    def commit(self, number: int) -> Committed:
        """Take over version ``number``.

        Raises:
            WeightsLost: it is not staged here; nothing has changed.
            What ``load=`` raises: the weights are torn then.
        """
        began = time.perf_counter()
        accepted = self._book.accepted(self._key)
        with closed_by_errors(self), self._lock:
            if self._legs and self._number != number:
                raise WeightsLost(self._missing(number)) from self._failure
            self._number = None
            now = {} if accepted.load else refreshed(accepted, self._reading)
            self._book.begin(self._key, number)
            done: tuple[Takeover, ...]
            if accepted.load is None:
                done = take_over(accepted, self._reading, now, self._spare)
            else:
                hand_over(accepted.load, self._spare)
                done = takeover(accepted, self._reading)
            self._book.finish(self._key, number, self._order.key)
        return Committed(time.perf_counter() - began, done)

    def _missing(self, number: int) -> str:
        if self._failure is not None:
            return f"version {number} is not staged here: {self._failure}; stage again"
        return f"version {number} is not staged here: it was taken over, or the next stage has begun; stage again"

    def close(self) -> None:
        """See :class:`TargetRank`; ends the thread."""
        self._ending.set()
        super().close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)
