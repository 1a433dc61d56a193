"""A rank's part of a plan: its tensors, its buckets, and the endpoints of the transports that carry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from phalanx.declare.weight_declarations import Accepted, Published
from phalanx.errors import WeightsMismatch, WeightsTransferError
from phalanx.weights.bucket_packing import DeltaPacking, Packing
from phalanx.weights.buckets import Bucket, buckets_from, buckets_to
from phalanx.weights.local_layout import LocalLayout, local_of, named_tensors, read_tensors
from phalanx.weights.megatron_layout import read_megatron
from phalanx.weights.plan import Locality
from phalanx.weights.process_copy import CopyEndpoint
from phalanx.weights.process_group import GroupSpec, ProcessGroupEndpoint
from phalanx.weights.ring import RingReceiver, RingSender
from phalanx.weights.tensors import Tensors
from phalanx.weights.transport import (
    COPY,
    CUDA_IPC,
    GLOO,
    NCCL,
    STORAGE,
    WITH_DELTAS,
    Endpoint,
    group_members,
)
from phalanx.weights.weight_requests import ConnectRequest, Side

_RING_BUCKET_BYTES = 16 << 20
"""Maximum bucket on a node. Larger copies are not faster, and the first write of the ring is slower than any copy."""
_ORDER = (Locality.REMOTE, Locality.NODE, Locality.PROCESS)
"""Order in which both sides work, so that no two ranks wait for each other crosswise."""


def model_of(declared: Published | Accepted) -> Any:
    """Return the declared module or mapping, or the result of the declared function."""
    model = declared.model
    if isinstance(model, torch.nn.Module | Mapping) or not callable(model):
        return model
    return model()


def read_layout(declared: Published | Accepted) -> LocalLayout:
    """Return the layout of the declared tensors on this rank.

    Raises:
        DeclarationError: if a tensor cannot be read; the message names it.
    """
    model = model_of(declared)
    if declared.megatron is not None:
        return read_megatron(model, declared.megatron)
    return read_tensors(model, declared.boxes)


def current_tensors(declared: Published | Accepted, planned: Tensors) -> Tensors:
    """Return the tensors of this moment, which must have the shapes and types of the plan.

    Raises:
        WeightsMismatch: if a tensor changed or is missing, or a target has a tensor that no version would update.
    """
    added: list[str] = []
    if declared.megatron is not None:
        tensors = read_layout(declared).tensors
    else:
        named = named_tensors(model_of(declared))
        tensors = {name: local_of(named[name]).detach() for name in planned if name in named}
        if isinstance(declared, Accepted):
            added = sorted(named.keys() - planned.keys())
    odd = added + [
        name
        for name, old in planned.items()
        if name not in tensors or tensors[name].shape != old.shape or tensors[name].dtype != old.dtype
    ]
    if odd:
        raise WeightsMismatch(
            f"{len(odd)} tensors are not what they were when this sync was planned: {', '.join(odd[:5])}; sync again, "
            "the next sync makes a new plan"
        )
    return tensors


class Route(NamedTuple):
    """The buckets of a rank over a transport, by source rank."""

    transport: str
    streams: Mapping[int, tuple[Bucket, ...]]
    endpoint: Endpoint
    packing: Packing


def make_routes(
    request: ConnectRequest,
    side: Side,
    rank: int,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> list[Route]:
    """Return the routes of a rank, in the order in which all ranks work.

    Args:
        device: device of the rank's tensors.
        check: raises if the tensors of a source were written to during a sync.
    """
    by_transport: dict[str, list[Locality]] = {}
    for locality in _ORDER:
        by_transport.setdefault(request.transports[locality], []).append(locality)
    by_transport.pop(STORAGE, None)
    routes: list[Route] = []
    for transport, localities in by_transport.items():
        limit, by_readers = _bucket_bytes(request, transport, localities), transport in (GLOO, NCCL)
        if side == "source":
            stream = buckets_from(request.plan, rank, limit, localities, by_readers=by_readers)
            streams = {rank: stream} if stream else {}
        else:
            streams = buckets_to(request.plan, rank, limit, localities, by_readers=by_readers)
        if not streams:
            continue
        if transport in (CUDA_IPC, NCCL) and device.type != "cuda":
            raise WeightsTransferError(
                f"transport {transport!r} needs all tensors of {side} rank {rank} on one CUDA device"
            )
        packing = DeltaPacking() if request.delta and transport in WITH_DELTAS else Packing()
        capacity = max(packing.capacity(bucket) for stream in streams.values() for bucket in stream)
        if transport == COPY:
            readers = {reader for bucket in streams.get(rank, ()) for reader in bucket.readers}
            pairs = [(rank, reader) for reader in sorted(readers)]
            if side == "target":
                pairs = [(source, rank) for source in streams]
            endpoint: Endpoint = CopyEndpoint(request.connection, pairs, check)
        elif by_readers:
            where = device if transport == NCCL else torch.device("cpu")
            spec = _group_spec(request, localities, capacity, where)
            endpoint = ProcessGroupEndpoint(spec, (side, rank), packing)
        else:
            where = device if transport == CUDA_IPC else torch.device("cpu")
            if side == "source":
                endpoint = RingSender(capacity, packing, where)
            else:
                addresses = {source: request.addresses[source] for source in streams}
                endpoint = RingReceiver(rank, addresses, packing, where)
        routes.append(Route(transport, streams, endpoint, packing))
    return routes


def _bucket_bytes(request: ConnectRequest, transport: str, localities: list[Locality]) -> int:
    """Return the maximum size of a bucket. A target of a process group has a bucket of each source in memory."""
    if transport not in (GLOO, NCCL):
        return request.bucket_bytes if transport == COPY else min(request.bucket_bytes, _RING_BUCKET_BYTES)
    sources: dict[int, set[int]] = {}
    for box in request.plan.boxes(localities):
        for target in box.targets:
            sources.setdefault(target, set()).add(box.source)
    most = max((len(ranks) for ranks in sources.values()), default=1)
    return max(4096, request.bucket_bytes // most)


def _group_spec(
    request: ConnectRequest, localities: list[Locality], capacity: int, device: torch.device
) -> GroupSpec:
    boxes = request.plan.boxes(localities)
    subgroups = sorted({(box.source, box.targets) for box in boxes if len(box.targets) > 1})
    members = group_members(request.plan, localities)
    return GroupSpec(request.store, request.connection, members, subgroups, capacity, device)
