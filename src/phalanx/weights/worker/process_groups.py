"""Process groups over both sides of a sync, made when the first one runs: all ranks are at it then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore

from phalanx.errors import WeightsTransferError
from phalanx.weights.planning.buckets import Bucket
from phalanx.weights.planning.locality import Hop
from phalanx.weights.transports.process_group import GroupSource, GroupTarget, SpanningGroup
from phalanx.weights.transports.transport_interface import Note, Read, Received, Write, silent
from phalanx.weights.worker.weight_requests import ConnectRequest

__all__ = ["LateGroupSource", "LateGroupTarget"]


def _spanning(
    order: ConnectRequest, *, source: int | None = None, target: int | None = None
) -> SpanningGroup:
    far = [piece for lane in order.plan.lanes for piece in lane.pieces if piece.hop is Hop.OTHER]
    host, _, port = order.store.partition("/")[0].rpartition(":")
    timeout = timedelta(seconds=order.timeout)
    try:
        store: Store = TCPStore(host, int(port), None, False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise WeightsTransferError(
            f"the source's rendezvous store at {order.store} cannot be reached from here ({error}); ranks of both "
            "groups must reach each other for transport='process group'"
        ) from error
    return SpanningGroup(
        store,
        f"weights/{order.key}",
        sources=sorted({piece.source for piece in far}),
        targets=sorted({target for piece in far for target in piece.targets}),
        source=source,
        target=target,
        timeout=order.timeout,
    )


class LateGroupSource:
    """The end of source ``index`` of a group that is made with the first sync."""

    def __init__(self, order: ConnectRequest, index: int) -> None:
        self._order = order
        self._index = index
        self._end: GroupSource | None = None

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float, note: Note = silent) -> int:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        if self._end is None:
            self._end = GroupSource(_spanning(self._order, source=self._index))
        return self._end.send(buckets, read, timeout=timeout, note=note)

    def close(self) -> None:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        if self._end is not None:
            self._end.close()


class LateGroupTarget:
    """The end of target ``index`` of a group that is made with the first sync."""

    def __init__(self, order: ConnectRequest, index: int) -> None:
        self._order = order
        self._index = index
        self._end: GroupTarget | None = None

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> Received:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        if self._end is None:
            self._end = GroupTarget(_spanning(self._order, target=self._index), self._index)
        return self._end.receive(buckets, write, timeout=timeout)

    def close(self) -> None:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        if self._end is not None:
            self._end.close()
