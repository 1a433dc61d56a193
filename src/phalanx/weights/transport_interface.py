"""The interface of transports, the choice of a transport by the locations of two ranks, and copies within a process.

Both sides have the same buckets, so that only numbers of buckets are sent. A source reads its tensors through ``read``
and a target writes its parameters through ``write``: both return views, so that each byte is copied once on each side.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, Packing, SlotView
from phalanx.weights.plan import Locality, Locations, Plan
from phalanx.weights.weight_requests import ConnectRequest, Side

COPY = "copy"
STORAGE = "shared storage"
SHARED_MEMORY = "shared memory"
CUDA_IPC = "cuda ipc"
GLOO = "gloo"
NCCL = "nccl"

TRANSPORTS = ("auto", SHARED_MEMORY, CUDA_IPC, GLOO, NCCL)
"""Values of ``WeightSync(transport=)``."""
WITH_DELTAS = (SHARED_MEMORY, GLOO)
"""Transports whose buckets are in host memory and may have any length."""


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
    """Return an error that names the peer."""
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
        streams: buckets by source rank. A source has its own only, a target its slots of the buckets that it reads.
        packing: packing of the buckets; the peers have the same.
        request: the connection.
        rank: rank of this end in the plan.
        device: device of the packed buckets on this rank.
        address: address that targets connect to; None if they need none.
    """

    transport: str
    streams: Mapping[int, Sequence[Bucket]]
    packing: Packing
    request: ConnectRequest
    rank: int
    device: torch.device
    address: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Allocate what the endpoint keeps from sync to sync."""

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets."""
        return [bucket for stream in self.streams.values() for bucket in stream]

    @property
    def readers(self) -> list[int]:
        """The target ranks that need some of the buckets."""
        return sorted({reader for bucket in self.buckets for reader in bucket.readers})

    @property
    def capacity(self) -> int:
        """Bytes of the largest packed bucket."""
        return max(map(self.packing.capacity, self.buckets))

    def bytes_by_source(self) -> dict[int, int]:
        """Return the bytes of all slots, by source rank."""
        return {
            source: sum(slot.nbytes for bucket in stream for slot in bucket.slots)
            for source, stream in self.streams.items()
        }

    def connect(self, deadline: Deadline) -> None:
        """Connect to the peers that are reachable before the first sync.

        Raises:
            WeightsTransferError: if this transport cannot reach a peer.
        """

    def send(self, version: Outgoing, deadline: Deadline) -> int:
        """Send all buckets in order, then its note to each reader, and return the bytes sent.

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


_Offer = tuple[Outgoing, bytes]
_Offers = queue.SimpleQueue[_Offer | None]
_offers: dict[tuple[str, int, int], _Offers] = {}
"""Queues between roles of this process, by connection, source rank and target rank."""


class CopyEndpoint(Endpoint):
    """The end of a role that has its peers in this process.

    A source only offers its tensors, since the same thread may receive afterwards. The target copies them, and then
    checks that they were not written to during the copy.
    """

    def __post_init__(self) -> None:
        pairs = [(source, self.rank) for source in self.streams]
        if self.request.side == "source":
            pairs = [(self.rank, reader) for reader in self.readers]
        keys = [(self.request.connection, *pair) for pair in pairs]
        self._queues = {key: _offers.setdefault(key, queue.SimpleQueue()) for key in keys}

    def send(self, version: Outgoing, deadline: Deadline) -> int:
        for (_, _, reader), offers in self._queues.items():
            offers.put((version, version.note(reader)))
        return sum(bucket.nbytes for bucket in self.buckets)

    def receive(self, write: SlotView, deadline: Deadline) -> dict[int, bytes]:
        notes: dict[int, bytes] = {}
        for (_, source, _), offers in self._queues.items():
            version, notes[source] = self._take(offers, f"source rank {source}", deadline)
            with torch.no_grad():
                for bucket in self.streams[source]:
                    for slot in bucket.slots:
                        write(slot).copy_(version.read(slot))
            version.check()
        return notes

    def _take(self, offers: _Offers, peer: str, deadline: Deadline) -> _Offer:
        while True:
            try:
                offer = offers.get(timeout=deadline.left(peer))
            except queue.Empty:
                continue  # the deadline raises
            if offer is None:
                raise lost(peer, f"{peer}, a role of this process, ended its part of the sync; sync again")
            return offer

    def close(self) -> None:
        for key, offers in self._queues.items():
            offers.put(None)  # wakes a target that waits
            _offers.pop(key, None)


def group_members(plan: Plan, localities: Sequence[Locality]) -> list[tuple[Side, int]]:
    """Return (side, rank) of the ranks that have something for each other over ``localities``, in a fixed order."""
    boxes = list(plan.boxes(localities))
    sources = sorted({box.source for box in boxes})
    targets = sorted({target for box in boxes for target in box.targets})
    return [*(("source", rank) for rank in sources), *(("target", rank) for rank in targets)]


def transport_choices(
    plan: Plan, locations: Locations, override: str, *, is_shared: bool
) -> list[Mapping[Locality, str]]:
    """Return the transports of each locality, best first. The next is tried if a target cannot use the last.

    Args:
        override: transport that the user chose; "auto" chooses by location.
        is_shared: whether targets share the storage of the source.
    """
    sides = {"source": locations.sources, "target": locations.targets}

    def devices(*localities: Locality) -> list[str]:
        """Return the devices of the ranks that work over ``localities``; none if a rank has host tensors."""
        found = [sides[side][rank].device for side, rank in group_members(plan, localities)]
        return found if all(found) else []

    def fits_nccl(*localities: Locality) -> bool:
        """Return whether each rank has a device of its own. NCCL refuses two ranks on a device."""
        return 0 < len(devices(*localities)) == len(set(devices(*localities)))

    node, remote = Locality.NODE, Locality.REMOTE
    near = [CUDA_IPC if override == CUDA_IPC else SHARED_MEMORY]
    if override == "auto" and devices(node):
        near = [CUDA_IPC, *([NCCL] if fits_nccl(node) else []), SHARED_MEMORY]
    choices = [
        (name, NCCL if fits_nccl(remote, *([node] if name == NCCL else [])) else GLOO) for name in near
    ]
    if override in (GLOO, NCCL):
        choices = [(override, override)]
    process = STORAGE if is_shared else COPY
    return [{Locality.PROCESS: process, node: near, remote: far} for near, far in choices]
