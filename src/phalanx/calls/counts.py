"""Counts of calls and bytes, of a group and of the process."""

from __future__ import annotations

from phalanx.wire.unpack import Meter


class Counts:
    """Counts since the start of a group, or of the process.

    Attributes:
        calls: number of calls that were sent.
        failed: number of these calls that raised an error.
        sent_bytes: bytes of messages to all ranks together.
        stored_bytes: bytes of separately stored values and constructor arguments, once for any number of ranks.
        arrived: counter of bytes that arrived in this process as results. Values passed by reference from rank to rank
            are not counted.
    """

    def __init__(self, whole: Counts | None = None) -> None:
        self.calls = 0
        self.failed = 0
        self.sent_bytes = 0
        self.stored_bytes = 0
        self.arrived = Meter(None if whole is None else whole.arrived.add)

    @property
    def fetched_bytes(self) -> int:
        return self.arrived.nbytes

    def as_dict(self) -> dict[str, int]:
        names = ("calls", "failed", "sent_bytes", "stored_bytes", "fetched_bytes")
        return {name: getattr(self, name) for name in names}


process = Counts()


def statistics() -> dict[str, int]:
    """Return the counts of this process since its start, over all of its groups and ``px.put``.

    ``calls`` and ``failed`` count calls. ``sent_bytes`` went into messages to ranks, ``stored_bytes`` into the object
    store, and ``fetched_bytes`` of results were read. ``group.statistics()`` has the same for a single group.
    """
    return process.as_dict()
