"""The interface of transports, and the requests and responses of a sync.

Both sides have the same buckets, so that only numbers of buckets are sent. A source reads its tensors through ``read``
and a target writes its parameters through ``write``: both return views, so that each byte is copied once on each side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, Packing, SlotView
from phalanx.weights.digests import Verify
from phalanx.weights.manifest import Manifest
from phalanx.weights.plan import Locality, Plan, RankLocation, Side
from phalanx.wire.messages import WeightsKey


class Description(NamedTuple):
    """The weights of a rank.

    Attributes:
        manifest: manifest of its tensors; None for a target that takes all complete tensors of the source.
        location: place of the rank.
        number: newest version that the rank knows; 0 before the first.
        share: True if the rank wants the source's storage.
        store: address of its group's rendezvous store, as "host:port/epoch".
    """

    manifest: Manifest | None
    location: RankLocation
    number: int
    share: bool
    store: str


@dataclass(frozen=True)
class ConnectRequest:
    """Request to create a rank's endpoints for a plan.

    Attributes:
        connection: name of the connection between two group epochs; never used twice.
        bucket_bytes: maximum size of a bucket.
        transports: transport of each locality.
        complete: manifest of a target that takes all complete tensors of the source.
        store: address of the rendezvous store over which a process group is created, as "host:port".
        delta: True to send only changes over the transports that support it.
        side, key: identify the weights of the rank.
        ranks: ranks of this side's group, in the plan's order.
        addresses: addresses of the sources' endpoints, for targets.
    """

    connection: str
    plan: Plan
    bucket_bytes: int
    transports: Mapping[Locality, str]
    complete: Manifest = field(default=Manifest(()))
    store: str = ""
    delta: bool = False
    side: Side = "source"
    key: WeightsKey = "", ""
    ranks: tuple[int, ...] = ()
    addresses: Mapping[int, Any] = field(default_factory=dict)

    def part(self, transport: str) -> Plan:
        """Return the part of the plan that a transport sends."""
        return self.plan.part(lambda box: self.transports[box.locality] == transport)


class SyncRequest(NamedTuple):
    """Request to send or receive version ``number`` over ``connection``.

    Attributes:
        timeout: seconds to wait for peers.
        step: count of optimizer steps that the caller expects.
    """

    connection: str
    number: int
    verify: Verify
    timeout: float
    step: int | None


class Sent(NamedTuple):
    """Response of a source: bytes, count of optimizer steps, and changes.

    ``changed`` has a byte for each source name of the plan, sorted: 1 if this rank's values differ from the last
    version over this connection.
    """

    nbytes: int
    changed: bytes
    step: int | None


class Deadline:
    """A time limit of ``timeout`` seconds from now."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout

    def left(self, peer: str) -> float:
        """Return the seconds that are left to wait for ``peer``.

        Raises:
            WeightsTransferError: if the time is over.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise lost(
                peer,
                f"{peer} did not respond within {self._timeout:g} s; check that it takes part in this sync and is "
                "alive, or pass a longer timeout=",
            )
        return left


def lost(
    peer: str, message: str, kind: type[WeightsTransferError] = WeightsTransferError
) -> WeightsTransferError:
    """Return an error with ``peer`` as its attribute."""
    error = kind(message)
    error.peer = peer
    return error


class Outgoing(NamedTuple):
    """A version that a source sends.

    Attributes:
        read: returns the source's elements of a slot.
        note: returns the message for a target rank. It is called once all buckets are packed.
        check: raises an error if the tensors were written to since the sync began.
    """

    read: SlotView
    note: Callable[[int], bytes]
    check: Callable[[], None]


@dataclass(eq=False)
class Endpoint:
    """The end of a transport on a source rank, which sends, or on a target rank, which receives.

    After an error an endpoint is closed, and the next sync connects new ones.

    Attributes:
        transport: name of the transport.
        streams: buckets by source rank. A source has only its own; a target has its slots of the buckets that it reads.
        packing: packing of the buckets, of the same class as on the peers.
        request: the connection.
        rank: rank of this end in the plan.
        device: device of the packed buckets on this rank.
        address: address that targets connect to; None if they need none.
        location: location of a target's tensors, if its sources write to them: it is their only reader.
    """

    transport: str
    streams: Mapping[int, Sequence[Bucket]]
    packing: Packing
    request: ConnectRequest
    rank: int
    device: torch.device
    address: Any = field(default=None, init=False)
    location: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        """Allocate the resources that the endpoint keeps from sync to sync.

        Raises:
            WeightsTransferError: if this transport cannot reach a peer.
        """

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, of all streams."""
        return [bucket for stream in self.streams.values() for bucket in stream]

    @property
    def readers(self) -> list[int]:
        """The target ranks that need some of the buckets."""
        return sorted({reader for bucket in self.buckets for reader in bucket.readers})

    @property
    def links(self) -> list[tuple[int, int]]:
        """(source rank, target rank) of this rank with each of its peers."""
        if self.request.side == "source":
            return [(self.rank, reader) for reader in self.readers]
        return [(source, self.rank) for source in self.streams]

    @property
    def capacity(self) -> int:
        """Bytes of the largest packed bucket."""
        return max(map(self.packing.capacity, self.buckets))

    def send(self, version: Outgoing, deadline: Deadline) -> int:
        """Send all buckets in order, then a note to each reader. Return the bytes sent in buckets.

        Raises:
            WeightsTransferError: if a reader died or did not respond in time.
        """
        raise NotImplementedError

    def receive(self, write: SlotView, deadline: Deadline) -> dict[int, bytes]:
        """Receive all buckets, and return the note of each source.

        Raises:
            WeightsTransferError: if a source died or did not respond in time. Bytes written before stay written.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release connections and memory, and end a transfer that is waiting on any thread. May be called again."""
