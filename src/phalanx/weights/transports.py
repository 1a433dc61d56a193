"""The transports: their names, copies within a process, and the choice for two ranks by their locations."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, DeltaPacking, Packing, SlotView, bucket_streams, copy_slots
from phalanx.weights.plan import Locality, Locations, Plan
from phalanx.weights.process_group import ProcessGroupEndpoint
from phalanx.weights.ring import RingReceiver, RingSender
from phalanx.weights.transport_interface import ConnectRequest, Deadline, Endpoint, Outgoing, lost

COPY = "copy"
STORAGE = "shared storage"
SHARED_MEMORY = "shared memory"
CUDA_IPC = "cuda ipc"
GLOO = "gloo"
NCCL = "nccl"

TRANSPORTS = ("auto", SHARED_MEMORY, CUDA_IPC, GLOO, NCCL)
"""Values of ``WeightSync(transport=)``."""
WITH_DELTAS = (SHARED_MEMORY, GLOO)
"""Transports that can send deltas: their buckets are in host memory and may have any length."""
_RING_BUCKET_BYTES = {SHARED_MEMORY: 16 << 20, CUDA_IPC: 64 << 20}
"""Maximum bytes of a bucket in a ring. In host memory, larger copies are not faster, and the first write of a page is
slow. On a device, messages between the ranks would take longer than the copies of smaller buckets."""
_LEAST_BUCKET_BYTES = 4096
_ORDER = (Locality.REMOTE, Locality.NODE, Locality.PROCESS)
"""Order in which both sides work, so that ranks never wait for each other in a cycle."""

_Offers = queue.SimpleQueue[Outgoing | None]
_offers: dict[tuple[str, int, int], _Offers] = {}
"""Queues between roles of this process, by connection, source rank and target rank."""


class CopyEndpoint(Endpoint):
    """The endpoint of a role whose peers are in this process.

    A source only offers its tensors, since the same thread may receive afterwards. The target copies them, and then
    checks that they were not written to during the copy.
    """

    def __post_init__(self) -> None:
        keys = [(self.request.connection, *link) for link in self.links]
        self._queues = {key: _offers.setdefault(key, queue.SimpleQueue()) for key in keys}

    def send(self, version: Outgoing, deadline: Deadline) -> int:
        for offers in self._queues.values():
            offers.put(version)
        return sum(bucket.nbytes for bucket in self.buckets)

    def receive(self, write: SlotView, deadline: Deadline) -> dict[int, bytes]:
        notes: dict[int, bytes] = {}
        for (_, source, _), offers in self._queues.items():
            version = self._take(offers, f"source rank {source}", deadline)
            for bucket in self.streams[source]:
                copy_slots(bucket.slots, version.read, write)
            version.check()
            notes[source] = version.note(self.rank)
        return notes

    def _take(self, offers: _Offers, peer: str, deadline: Deadline) -> Outgoing:
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


def transport_choices(
    plan: Plan, locations: Locations, override: str, *, is_shared: bool
) -> list[Mapping[Locality, str]]:
    """Return the choices of a transport for each locality, best first. The next is tried if a rank cannot use a choice.

    Args:
        override: transport that the user chose; "auto" chooses by location.
        is_shared: whether targets share the storage of the source.
    """
    sides = {"source": locations.sources, "target": locations.targets}

    def devices(*localities: Locality) -> list[str]:
        """Return the devices of the ranks that work over ``localities``; none if a rank has host tensors."""
        members = plan.part(lambda box: box.locality in localities).members
        found = [sides[side][rank].device for side, rank in members]
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


def make_endpoints(request: ConnectRequest, rank: int, device: torch.device) -> list[Endpoint]:
    """Return the endpoints of a rank whose tensors are on ``device``, in the order in which all ranks work.

    Raises:
        WeightsTransferError: if a transport cannot reach a peer, or needs device tensors, and they are not on a single
            device.
    """
    endpoints: list[Endpoint] = []
    ring = RingSender if request.side == "source" else RingReceiver
    kinds = {COPY: CopyEndpoint, GLOO: ProcessGroupEndpoint, NCCL: ProcessGroupEndpoint}
    for transport in dict.fromkeys(request.transports[locality] for locality in _ORDER):
        streams = {} if transport == STORAGE else _streams(request, transport, rank)
        if not streams:
            continue
        on_device = transport in (CUDA_IPC, NCCL)
        if on_device and device.type != "cuda":
            raise WeightsTransferError(
                f"transport {transport!r} needs all tensors of {request.side} rank {rank} on one CUDA device"
            )
        packing = DeltaPacking() if request.delta and transport in WITH_DELTAS else Packing()
        packed_on = device if on_device else torch.device("cpu")
        endpoints.append(kinds.get(transport, ring)(transport, streams, packing, request, rank, packed_on))
    return endpoints


def _streams(request: ConnectRequest, transport: str, rank: int) -> Mapping[int, Sequence[Bucket]]:
    """Return the buckets that a rank sends or receives over a transport, by source rank."""
    plan, limit, by_readers = request.part(transport), request.bucket_bytes, transport in (GLOO, NCCL)
    if by_readers:  # a target has memory for a bucket of each of its sources
        pairs = {(target, box.source) for box in plan.boxes for target in box.targets}
        most = max(Counter(target for target, _ in pairs).values(), default=1)
        limit = max(_LEAST_BUCKET_BYTES, limit // most)
    elif transport != COPY:
        limit = min(limit, _RING_BUCKET_BYTES[transport])
    return bucket_streams(plan, request.side, rank, limit, by_readers=by_readers)
