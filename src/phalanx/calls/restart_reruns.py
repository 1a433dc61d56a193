"""Calls that a restart repeats, as they were sent."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.calls.call_state import CallInfo
from phalanx.errors import StaleEpoch
from phalanx.wire.messages import OUTPUT, Message


@dataclass
class Repeat:
    """A call as its ranks received it: later changes to the caller's arguments do not affect it.

    ``succeeded`` is False until the end of the call is known.
    """

    role: str
    method: str
    ranks: tuple[int, ...]
    sent: tuple[Message, ...]
    call: weakref.ref[CallInfo]
    succeeded: bool = False

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.role, self.method, self.ranks

    def extended(self, joining: range) -> Repeat | None:
        """Extend the call to ``joining`` ranks; return the call for them, None if not all ranks got equal messages."""
        everyone = tuple(range(joining.start))
        if self.ranks[: joining.start] != everyone or any(message != self.sent[0] for message in self.sent):
            return None
        for_them = replace(self, ranks=tuple(joining), sent=self.sent[:1] * len(joining))
        self.ranks = (*everyone, *joining)
        self.sent = self.sent[:1] * len(self.ranks)
        return for_them

    def within(self, size: int) -> Repeat | None:
        """Return the call for the ranks below ``size``; None if there are none."""
        kept = {rank: sent for rank, sent in zip(self.ranks, self.sent, strict=True) if rank < size}
        return replace(self, ranks=tuple(kept), sent=tuple(kept.values())) if kept else None

    def messages(self, number: int, epoch: int, trace: str = "") -> Iterator[Message]:
        """Yield the messages for the ranks of a new epoch; ``trace`` is the id of the trace that is on."""
        for message in self.sent:
            call = message.unpack()._replace(epoch=epoch, returns=OUTPUT, number=number, trace=trace)
            yield call.pack(message.refs)


class RerunLog:
    """The calls of a group that were declared with ``rerun_on_restart=True``, in order.

    Of several calls of a method on the same ranks (of those that there still are) only the last successful call is
    repeated: a worker that loaded checkpoint 100 and then 200 loads 200.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: list[Repeat] = []

    def add(self, call: CallInfo, sent: Sequence[Message]) -> None:
        """Record a call that was just sent."""
        entry = Repeat(call.role, call.method, tuple(call.plan.ranks), tuple(sent), weakref.ref(call))
        with self._lock:
            self.entries.append(entry)
            self._forget_older(entry.key)

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        """Record the end of a call: a failed call is not repeated, a successful call replaces earlier calls."""
        with self._lock:
            for entry in [entry for entry in self.entries if entry.call() is call]:
                if entry.succeeded and isinstance(error, StaleEpoch):
                    continue  # a restart has counted it as a success, and repeated it
                entry.succeeded = True
                if error is not None:
                    self.entries.remove(entry)
                self._forget_older(entry.key)

    def _forget_older(self, key: tuple[str, str, tuple[int, ...]]) -> None:
        """Forget all but the last of the calls that succeeded, or whose end will not be known."""
        over = [e for e in self.entries if e.key == key and (e.succeeded or e.call() is None)]
        for older in over[:-1]:
            self.entries.remove(older)

    def to_make(self, size: int) -> list[Repeat]:
        """Return the calls to repeat, for the ranks below ``size``, in order.

        A call whose end is not known counts as a success.
        """
        with self._lock:
            self.entries = [kept for entry in self.entries if (kept := entry.within(size)) is not None]
            last = {entry.key: index for index, entry in enumerate(self.entries)}
            self.entries = [entry for index, entry in enumerate(self.entries) if last[entry.key] == index]
            for entry in self.entries:
                entry.succeeded = True
            return list(self.entries)
