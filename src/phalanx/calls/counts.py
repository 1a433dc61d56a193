"""What this process has sent, stored and fetched, by group and in all; and what a monitor is told of its calls."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from phalanx.calls.listeners import CallInfo, CallListener
from phalanx.display.metric_buffer import meters
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.messages import full_name
from phalanx.wire.unpack import Meter


@dataclass
class Counts:
    """Numbers since the start of a group, or of the process.

    ``sent_bytes`` are those of the messages to all ranks together, ``stored_bytes`` those of the values that were
    stored beside them, once for any number of ranks. ``fetched_bytes`` arrived in this process as results; what a
    future hands from rank to rank is not among them.
    """

    calls: int = 0
    failed: int = 0
    sent_bytes: int = 0
    stored_bytes: int = 0
    fetched_bytes: int = 0


class Book(CallListener):
    """The counts of one group; what is booked here is booked for the process too.

    What a group stores and fetches beside its calls (the arguments of constructors) is booked by whoever does it.
    """

    def __init__(self, whole: Book | None = None) -> None:
        self.counts = Counts()
        self._whole = whole
        self.arrived_bytes = Meter(self.fetched)

    def sent(self, call: CallInfo, nbytes: int) -> None:
        """One call was sent."""
        book: Book | None = self
        while book is not None:
            book.counts.calls += 1
            book.counts.sent_bytes += nbytes
            book = book._whole

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        """One call is over."""
        book: Book | None = self if error is not None and call.was_sent else None
        while book is not None:
            book.counts.failed += 1
            book = book._whole

    def put(self, nbytes: int) -> None:
        """A value was stored."""
        self.counts.stored_bytes += nbytes
        if self._whole is not None:
            self._whole.put(nbytes)

    def fetched(self, nbytes: int) -> None:
        """A value arrived."""
        self.counts.fetched_bytes += nbytes
        if self._whole is not None:
            self._whole.fetched(nbytes)


class CallMeter(CallListener):
    """Tells a monitor, where one is there, of each call that is over."""

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        life = call.life
        if meters.on and call.number != SETUP_CALL and not life.transport.immediate:
            name = full_name(call.role, call.method)
            meters.ended(life.name, name, life.transport.now() - call.started, error is not None)


process = Book()


def statistics() -> dict[str, int]:
    """Counts of this process over all of its groups and ``px.put``, since it was started.

    ``calls`` and ``failed`` calls; ``sent_bytes`` in messages to ranks, ``stored_bytes`` in the object store,
    ``fetched_bytes`` of results that this process read. ``group.statistics()`` has the same for one group.
    """
    return asdict(process.counts)
