"""The endpoints of a rank: one for each transport over which it sends or receives something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, DeltaPacking, Packing, buckets_from, buckets_to
from phalanx.weights.plan import Locality
from phalanx.weights.process_group import ProcessGroupEndpoint
from phalanx.weights.ring import RingReceiver, RingSender
from phalanx.weights.transport_interface import (
    COPY,
    CUDA_IPC,
    GLOO,
    NCCL,
    STORAGE,
    WITH_DELTAS,
    CopyEndpoint,
    Endpoint,
)
from phalanx.weights.weight_requests import ConnectRequest

_RING_BUCKET_BYTES = 16 << 20
"""Maximum bucket on a node. Larger copies are not faster, and the first write of the ring is slower than any copy."""
_LEAST_BUCKET_BYTES = 4096
_ORDER = (Locality.REMOTE, Locality.NODE, Locality.PROCESS)
"""Order in which both sides work, so that no two ranks wait for each other crosswise."""


def make_endpoints(request: ConnectRequest, rank: int, device: torch.device) -> list[Endpoint]:
    """Return the endpoints of a rank whose tensors are on ``device``, in the order in which all ranks work.

    Raises:
        WeightsTransferError: if a transport needs device tensors, and they are not on a single device.
    """
    endpoints: list[Endpoint] = []
    for transport in dict.fromkeys(request.transports[locality] for locality in _ORDER):
        streams = {} if transport == STORAGE else _streams(request, transport, rank)
        if not streams:
            continue
        packed_on = device if transport in (CUDA_IPC, NCCL) else torch.device("cpu")
        if transport in (CUDA_IPC, NCCL) and device.type != "cuda":
            raise WeightsTransferError(
                f"transport {transport!r} needs all tensors of {request.side} rank {rank} on one CUDA device"
            )
        packing = DeltaPacking() if request.delta and transport in WITH_DELTAS else Packing()
        ring = RingSender if request.side == "source" else RingReceiver
        kinds = {COPY: CopyEndpoint, GLOO: ProcessGroupEndpoint, NCCL: ProcessGroupEndpoint}
        endpoints.append(kinds.get(transport, ring)(transport, streams, packing, request, rank, packed_on))
    return endpoints


def _streams(request: ConnectRequest, transport: str, rank: int) -> Mapping[int, Sequence[Bucket]]:
    """Return the buckets that a rank sends or receives over a transport, by source rank."""
    plan, localities = request.plan, request.localities(transport)
    limit, by_readers = request.bucket_bytes, transport in (GLOO, NCCL)
    if by_readers:  # a target has a bucket of each of its sources in memory
        pairs = {(target, box.source) for box in plan.boxes(localities) for target in box.targets}
        most = max(Counter(target for target, _ in pairs).values(), default=1)
        limit = max(_LEAST_BUCKET_BYTES, limit // most)
    elif transport != COPY:
        limit = min(limit, _RING_BUCKET_BYTES)
    if request.side == "target":
        return buckets_to(plan, rank, limit, localities, by_readers=by_readers)
    stream = buckets_from(plan, rank, limit, localities, by_readers=by_readers)
    return {rank: stream} if stream else {}
