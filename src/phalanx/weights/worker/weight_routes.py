"""A rank's part of one plan: its tensors, its buckets, and the ends of the movers that carry them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from phalanx.declare.weight_declarations import Accepted, Published
from phalanx.errors import InternalError, WeightsMismatch
from phalanx.weights.planning.buckets import Bucket, buckets_from, buckets_to
from phalanx.weights.planning.locality import Hop
from phalanx.weights.planning.readers.megatron_layout import read_megatron
from phalanx.weights.planning.readers.plain import Reading, local_of, named_tensors, read_tensors
from phalanx.weights.planning.resharding_plan import Plan
from phalanx.weights.planning.tensors import Tensors
from phalanx.weights.transports.bucket_packing import PLAIN, DeltaPacking, Packing
from phalanx.weights.transports.local import LocalSource, LocalTarget, Meeting
from phalanx.weights.transports.ring import RingSource, RingTarget
from phalanx.weights.transports.shared_segment import PlacedSource, PlacedTarget, PlacedTensors
from phalanx.weights.transports.store_transport import StoreSource, StoreTarget
from phalanx.weights.transports.transport_interface import WeightReceiver, WeightSender
from phalanx.weights.worker.bucket_store import RankShelf
from phalanx.weights.worker.process_groups import LateGroupSource, LateGroupTarget
from phalanx.weights.worker.weight_requests import DELTA_MOVERS, IN_PLACE, ConnectRequest

__all__ = [
    "SHARED",
    "ReceiveRoute",
    "SendRoute",
    "check_watched",
    "closed_by_errors",
    "is_placed",
    "part_meetings",
    "read",
    "readers_of",
    "refreshed",
    "source_legs",
    "target_legs",
    "watch",
]

B = TypeVar("B", covariant=True)

HOPS = (Hop.OTHER, Hop.NODE, Hop.PROCESS)
"""The order in which both sides work, so that no two ranks wait for each other crosswise."""

_RING_BUCKET_BYTES = 16 << 20
"""Of a bucket between ranks of a node at most: copies take as long as with larger ones, and first touch of the ring,
slower than any copy, is of two of these."""

SHARED = "shared"
"""In place of a mover: the target's parameters are the source's storage, and nothing travels."""

_meetings: dict[tuple[str, int, int], Meeting] = {}
"""Of roles that share this process: by key of the ends, source rank and target rank."""

_watches: dict[tuple[str, int], tuple[Callable[[], None], int]] = {}
"""Of sources from whose storage roles of this process copy: what raises if it was written to, by key and rank.

And how many will ask."""


class SendRoute(NamedTuple):
    """What a source sends over one hop; ``deltas`` where only what changed does."""

    hop: Hop
    end: WeightSender
    buckets: tuple[Bucket, ...]
    deltas: DeltaPacking | None = None


class ReceiveRoute(NamedTuple):
    """What a target receives over one hop, by source."""

    hop: Hop
    end: WeightReceiver
    buckets: Mapping[int, tuple[Bucket, ...]]
    deltas: DeltaPacking | None = None


def model_of(declared: Published | Accepted) -> Any:
    """The module or mapping that was declared, or that the function gives which was."""
    model = declared.model
    if isinstance(model, torch.nn.Module | Mapping) or not callable(model):
        return model
    return model()


def is_placed(accepted: Accepted) -> bool:
    """Whether what is accepted is handed on out of a segment of this library's making."""
    return accepted.load is not None and accepted.memory is None and hasattr(os, "memfd_create")


def read(declared: Published | Accepted) -> Reading:
    """What this rank holds of what was declared.

    Raises:
        DeclarationError: a tensor cannot be read; the message names it.
    """
    model = model_of(declared)
    if declared.megatron is not None:
        return read_megatron(model, declared.megatron)
    return read_tensors(model, declared.boxes)


def refreshed(declared: Published | Accepted, before: Reading) -> Tensors:
    """The tensors as they are now, which must be of the shapes and types that they had when the plan was made.

    Raises:
        WeightsMismatch: one is not, or is gone; or a target has one that no version would reach.
    """
    new: list[str] = []
    if declared.megatron is not None:
        now: dict[str, torch.Tensor] = read(declared).tensors
    else:
        found = named_tensors(model_of(declared))
        now = {name: local_of(found[name]).detach() for name in before.tensors if name in found}
        if isinstance(declared, Accepted):
            new = sorted(found.keys() - before.tensors.keys())
    odd = new + [
        name
        for name, old in before.tensors.items()
        if name not in now or now[name].shape != old.shape or now[name].dtype != old.dtype
    ]
    if odd:
        raise WeightsMismatch(
            f"{len(odd)} tensors are not what they were when this sync was planned: {', '.join(odd[:5])}; sync again, "
            "which plans anew"
        )
    return now


def source_legs(order: ConnectRequest, index: int, shelf: RankShelf) -> list[SendRoute]:
    """The ends over which source ``index`` sends, far ones first."""
    return [
        SendRoute(hop, _source_end(mover, order, index, buckets, shelf, deltas or PLAIN), buckets, deltas)
        for hop, mover, buckets, deltas in _cut(order, index, buckets_from)
    ]


def target_legs(
    order: ConnectRequest, index: int, shelf: RankShelf, placed: PlacedTensors | None = None
) -> list[ReceiveRoute]:
    """The ends over which target ``index`` receives, far ones first; ``placed`` is what may be written by others."""
    return [
        ReceiveRoute(
            hop, _target_end(mover, order, index, buckets, shelf, deltas or PLAIN, placed), buckets, deltas
        )
        for hop, mover, buckets, deltas in _cut(order, index, buckets_to)
    ]


class _Cutting(Protocol[B]):
    def __call__(
        self, plan: Plan, rank: int, bucket_bytes: int, hops: Sequence[Hop], /, *, by_readers: bool
    ) -> B: ...


def _cut(
    order: ConnectRequest, index: int, cut: _Cutting[B]
) -> Iterator[tuple[Hop, str, B, DeltaPacking | None]]:
    """For each hop over which this rank has something: the hop, its mover, the buckets, and how deltas are packed."""
    for hop in HOPS:
        mover = order.movers[hop]
        if mover == SHARED:
            continue
        limit = min(order.bucket_bytes, _RING_BUCKET_BYTES) if mover == "segments" else order.bucket_bytes
        buckets = cut(order.plan, index, limit, [hop], by_readers=_sends_apart(mover))
        if buckets:
            yield hop, mover, buckets, _deltas(order, mover)


def _sends_apart(mover: str) -> bool:
    """Whether readers fetch what they need, rather than look at one memory."""
    return mover in ("store", "process group")


def _deltas(order: ConnectRequest, mover: str) -> DeltaPacking | None:
    """For movers whose buckets may be of any length."""
    return DeltaPacking() if order.delta and mover in DELTA_MOVERS else None


def _source_end(
    mover: str,
    order: ConnectRequest,
    index: int,
    buckets: tuple[Bucket, ...],
    shelf: RankShelf,
    packing: Packing,
) -> WeightSender:
    if mover == "copy":
        return LocalSource(
            _met(order.key, ((index, reader) for reader in readers_of(buckets)), 1), wait=False
        )
    if mover == "segments":
        return RingSource(index, max(map(packing.room, buckets)), packing=packing)
    if mover == IN_PLACE:
        return PlacedSource(index)
    if mover == "store":
        return StoreSource(shelf, packing)
    if mover == "process group":
        return LateGroupSource(order, index)
    raise InternalError(f"there is no mover {mover!r}")


def _target_end(
    mover: str,
    order: ConnectRequest,
    index: int,
    buckets: Mapping[int, object],
    shelf: RankShelf,
    packing: Packing,
    placed: PlacedTensors | None,
) -> WeightReceiver:
    if mover == "copy":
        return LocalTarget(_met(order.key, ((source, index) for source in buckets), 0))
    if mover == "segments":
        ring = RingTarget(index, order.addresses, packing=packing)
        ring.connect(buckets, timeout=order.timeout)
        return ring
    if mover == IN_PLACE and placed is not None:
        there = PlacedTarget(index, order.addresses, placed)
        there.connect(buckets, timeout=order.timeout)
        return there
    if mover == "store":
        return StoreTarget(shelf, index, packing)
    if mover == "process group":
        return LateGroupTarget(order, index)
    raise InternalError(f"there is no mover {mover!r}")


class _Closing(Protocol):
    def close(self) -> None: ...


@contextlib.contextmanager
def closed_by_errors(rank: _Closing) -> Generator[None]:
    """A part in a sync that ends with the first error: whatever is left of it could not be used."""
    try:
        yield
    except BaseException:
        rank.close()
        raise


def readers_of(buckets: Iterable[Bucket]) -> list[int]:
    """The target ranks that read some of these buckets."""
    return sorted({reader for bucket in buckets for reader in bucket.readers})


def _met(key: str, pairs: Iterable[tuple[int, int]], by: int) -> dict[int, Meeting]:
    """Where two roles of this process meet, by the rank of the other one."""
    return {pair[by]: _meetings.setdefault((key, *pair), Meeting()) for pair in pairs}


def watch(key: str, source: int, readers: int, check: Callable[[], None]) -> None:
    """Have ``check`` asked by so many roles of this process that copy from a source, when each of them has."""
    if readers:
        _watches[key, source] = (check, readers)


def check_watched(key: str, source: int) -> None:
    """Ask what :func:`watch` noted. Raises what that raises."""
    check, readers = _watches.pop((key, source), (None, 0))
    if check is not None:
        watch(key, source, readers - 1, check)
        check()


def part_meetings(key: str) -> None:
    """Forget where roles met for these ends."""
    for watched in [one for one in list(_watches) if one[0] == key]:  # other threads add some meanwhile
        _watches.pop(watched, None)
    for met in [one for one in list(_meetings) if one[0] == key]:
        _meetings.pop(met, None)
