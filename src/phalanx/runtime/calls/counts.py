"""What this process has sent, stored and fetched, by group and in all."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from phalanx.wire.arrival import Meter


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


class Book:
    """The counts of one group; what is booked here is booked for the process too."""

    def __init__(self, whole: Book | None = None) -> None:
        self.counts = Counts()
        self._whole = whole
        self.arrived = Meter(self.fetched)

    def called(self, sent: int) -> None:
        """One call was sent."""
        self.counts.calls += 1
        self.counts.sent_bytes += sent
        if self._whole is not None:
            self._whole.called(sent)

    def failed(self) -> None:
        """One call failed."""
        self.counts.failed += 1
        if self._whole is not None:
            self._whole.failed()

    def stored(self, nbytes: int) -> None:
        """A value was stored."""
        self.counts.stored_bytes += nbytes
        if self._whole is not None:
            self._whole.stored(nbytes)

    def fetched(self, nbytes: int) -> None:
        """A value arrived."""
        self.counts.fetched_bytes += nbytes
        if self._whole is not None:
            self._whole.fetched(nbytes)


process = Book()


def statistics() -> dict[str, int]:
    """Counts of this process over all of its groups and ``px.put``, since it was started.

    ``calls`` and ``failed`` calls; ``sent_bytes`` in messages to ranks, ``stored_bytes`` in the object store,
    ``fetched_bytes`` of results that this process read. ``group.statistics()`` has the same for one group.
    """
    return asdict(process.counts)
