"""A rank's part of a plan: its tensors, its buckets, and the endpoints of the transports that carry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.declare.weight_declarations import Accepted, Published
from phalanx.errors import WeightsMismatch, WeightsTransferError
from phalanx.weights.buckets import DeltaPacking, Packing, buckets_from, buckets_to
from phalanx.weights.local_layout import LocalLayout, local_of, named_tensors, read_megatron, read_tensors
from phalanx.weights.plan import Locality
from phalanx.weights.process_group import ProcessGroupEndpoint
from phalanx.weights.ring import RingReceiver, RingSender
from phalanx.weights.tensors import Tensors
from phalanx.weights.transport_interface import (
    COPY,
    CUDA_IPC,
    GLOO,
    NCCL,
    STORAGE,
    WITH_DELTAS,
    CopyEndpoint,
    Endpoint,
    group_members,
)
from phalanx.weights.weight_requests import ConnectRequest

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
    odd = added + odd_tensors(tensors, planned)
    if odd:
        raise WeightsMismatch(
            f"{len(odd)} tensors are not what they were when this sync was planned: {', '.join(odd[:5])}; sync again, "
            "the next sync makes a new plan"
        )
    return tensors


def odd_tensors(tensors: Tensors, like: Tensors) -> list[str]:
    """Return the names in ``like`` whose tensors are missing, or have another shape or type."""
    return [
        name
        for name, wanted in like.items()
        if name not in tensors or tensors[name].shape != wanted.shape or tensors[name].dtype != wanted.dtype
    ]


def make_endpoints(
    request: ConnectRequest, rank: int, device: torch.device, check: Callable[[], None] = lambda: None
) -> list[Endpoint]:
    """Return the endpoints of a rank, in the order in which all ranks work.

    Args:
        device: device of the rank's tensors.
        check: raises if the tensors of a source were written to during a sync.

    Raises:
        WeightsTransferError: if a transport needs device tensors, and they are not on a single device.
    """
    by_transport: dict[str, list[Locality]] = {}
    for locality in _ORDER:
        by_transport.setdefault(request.transports[locality], []).append(locality)
    by_transport.pop(STORAGE, None)
    endpoints = [
        _endpoint(request, transport, localities, rank, device, check)
        for transport, localities in by_transport.items()
    ]
    return [endpoint for endpoint in endpoints if endpoint is not None]


def _endpoint(
    request: ConnectRequest,
    transport: str,
    localities: list[Locality],
    rank: int,
    device: torch.device,
    check: Callable[[], None],
) -> Endpoint | None:
    """Return the endpoint of a transport; None if nothing is sent over it."""
    side, plan = request.side, request.plan
    limit, by_readers = _bucket_bytes(request, transport, localities), transport in (GLOO, NCCL)
    if side == "source":
        stream = buckets_from(plan, rank, limit, localities, by_readers=by_readers)
        streams = {rank: stream} if stream else {}
    else:
        streams = buckets_to(plan, rank, limit, localities, by_readers=by_readers)
    if not streams:
        return None
    if transport == COPY:
        return CopyEndpoint(transport, streams, Packing(), request.connection, side, rank, check)
    if transport not in (CUDA_IPC, NCCL):
        device = torch.device("cpu")
    elif device.type != "cuda":
        raise WeightsTransferError(
            f"transport {transport!r} needs all tensors of {side} rank {rank} on one CUDA device"
        )
    packing = DeltaPacking() if request.delta and transport in WITH_DELTAS else Packing()
    common = transport, streams, packing
    if by_readers:
        subgroups = {(box.source, box.targets) for box in plan.boxes(localities) if len(box.targets) > 1}
        members = group_members(plan, localities)
        key, store = request.connection, request.store
        return ProcessGroupEndpoint(*common, (side, rank), store, key, members, sorted(subgroups), device)
    if side == "source":
        return RingSender(*common, device)
    return RingReceiver(*common, rank, request.addresses, device)


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
