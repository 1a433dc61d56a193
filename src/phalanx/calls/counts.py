"""Numbers of calls and bytes, of a group and of the process."""

from __future__ import annotations

from phalanx.wire.unpack import Meter


class Counts:
    """Numbers since the start of a group, or of the process.

    Attributes:
        calls: number of calls that were sent.
        failed: number of these calls that raised an error.
        sent_bytes: of messages to all ranks together.
        stored_bytes: of values that were stored separately, once for any number of ranks; also of constructors.
        arrived: counts bytes that arrived in this process as results. Values passed by reference from rank to rank are
            not counted.
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
    """Counts of this process over all of its groups and ``px.put``, since it was started.

    ``calls`` and ``failed`` calls; ``sent_bytes`` in messages to ranks, ``stored_bytes`` in the object store,
    ``fetched_bytes`` of results that this process read. ``group.statistics()`` has the same for a single group.
    """
    return process.as_dict()
