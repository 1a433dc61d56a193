"""A target rank's part of syncs."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator, Mapping

import torch

from phalanx.declare.weight_declarations import Accepted, Load
from phalanx.errors import DeclarationError, InternalError, WeightsError, WeightsVerificationError
from phalanx.tracing.spans import span as px_span
from phalanx.tracing.weight_report import span_attributes
from phalanx.weights.planning.buckets import Slot
from phalanx.weights.planning.digests import PieceDigest, Verify, compare, digest_pieces
from phalanx.weights.planning.locality import Hop
from phalanx.weights.planning.readers.plain import Reading, named_tensors
from phalanx.weights.planning.shard_manifest import Manifest
from phalanx.weights.planning.tensors import Tensors, dtype_named, echo, write_slot
from phalanx.weights.transports.local import share
from phalanx.weights.transports.shared_segment import PlacedTensors
from phalanx.weights.transports.transport_interface import Write
from phalanx.weights.worker.bucket_store import OnShelf, RankShelf
from phalanx.weights.worker.weight_registry import Key, WeightRegistry
from phalanx.weights.worker.weight_requests import Arrived, ConnectRequest, SyncRequest
from phalanx.weights.worker.weight_routes import (
    SHARED,
    ReceiveRoute,
    check_watched,
    closed_by_errors,
    is_placed,
    model_of,
    part_meetings,
    read,
    refreshed,
    target_legs,
)

__all__ = ["TargetRank", "hand_over"]

_DIGEST_BYTES = 8


class TargetRank:
    """Receives versions over the ends that it makes for a plan. After an error it is closed; another must be made."""

    def __init__(
        self,
        book: WeightRegistry,
        order: ConnectRequest,
        index: int,
        shelf: RankShelf,
        source: Reading | None = None,
    ) -> None:
        self._book = book
        self._key: Key = (order.asked.role, order.asked.name)
        self._order = order
        self._closing = threading.Lock()
        self._index = index
        self._shelf = shelf
        self._plan = order.plan.of(target=index)
        accepted = book.accepted(self._key)
        self._reading, self._placed = _reading(accepted, order.given)
        self._source = source
        self._share(accepted)
        self._legs = target_legs(order, index, shelf, self._placed)
        self._sizes = {leg.hop: _bytes_by_source(leg) for leg in self._legs}
        self._deltas = [leg.deltas for leg in self._legs if leg.deltas is not None]
        self._torn_by: int | None = None

    def _share(self, accepted: Accepted) -> None:
        """Let the parameters be the storage of the source role of this process, where that was asked for."""
        if self._source is not None and SHARED in self._order.movers.values():
            tensors = named_tensors(model_of(accepted))
            share(self._source.tensors, tensors, (self._source.manifest, self._reading.manifest))

    def receive(self, sync: SyncRequest, given: Mapping[int, OnShelf]) -> Arrived:
        """Receive a version into the role's parameters, or hand it to what loads it.

        Args:
            given: what sources have put into the object store for it.

        Raises:
            WeightsTransferError: a source died, was late, or (WeightsVerificationError) what came is not what was
            sent: they are torn.
        """
        began = time.perf_counter()
        accepted = self._book.accepted(self._key)
        with closed_by_errors(self):
            has = self._book.arrived(self._key)
            for deltas in self._deltas:
                deltas.begin(has.number if has is not None and has.by == self._order.key else None)
            tensors = self._reading.tensors if accepted.load else refreshed(accepted, self._reading)
            nbytes, by_source = self._receive(sync, given, tensors, into_model=accepted.load is None)
            if accepted.load is not None:
                self._begin(sync)
                hand_over(accepted.load, tensors)
            self._begin(sync)
            self._book.finish(self._key, sync.number, self._order.key)
            for deltas in self._deltas:
                deltas.end(sync.number)
        return Arrived(nbytes, time.perf_counter() - began, by_source)

    def _begin(self, sync: SyncRequest) -> None:
        """From now on the role's weights may be of no one version."""
        if self._torn_by != sync.number:
            self._book.begin(self._key, sync.number)
            self._torn_by = sync.number

    def _receive(
        self, sync: SyncRequest, given: Mapping[int, OnShelf], tensors: Tensors, *, into_model: bool
    ) -> tuple[int, tuple[tuple[int, str, int], ...]]:
        def write(slot: Slot) -> torch.Tensor:
            if into_model:
                self._begin(sync)
            return write_slot(tensors, slot)

        self._shelf.given = given
        nbytes, by_source, notes = self._take(write, sync.timeout, sync.number)
        self._shelf.given = {}
        self._verify(sync.number, sync.verify, tensors, notes)
        echo(self._plan, tensors)
        return nbytes, by_source

    def _take(
        self, write: Write, timeout: float, number: int
    ) -> tuple[int, tuple[tuple[int, str, int], ...], Mapping[int, bytes]]:
        """Receive over all legs: bytes, bytes by source and mover, and what each source noted."""
        nbytes, notes = 0, dict[int, bytes]()
        by_source: list[tuple[int, str, int]] = []
        for leg in self._legs:
            mover, sizes = self._order.movers[leg.hop], self._sizes[leg.hop]
            with self._span(number, mover, sizes):
                got = leg.end.receive(leg.buckets, write, timeout=timeout)
            nbytes += got.nbytes
            notes |= got.notes
            by_source += [(source, mover, size) for source, size in sizes.items()]
            if leg.hop is Hop.PROCESS:
                for source in sizes:
                    check_watched(self._order.key, source)
        return nbytes, tuple(by_source), notes

    def _span(
        self, number: int, mover: str, sizes: Mapping[int, int]
    ) -> contextlib.AbstractContextManager[object]:
        """For traces: the time in which one mover brings a version."""
        return px_span(f"weights {self._key[1]!r}", **span_attributes(number, mover, sizes))

    def _verify(self, wanted: int, verify: Verify, tensors: Tensors, notes: Mapping[int, bytes]) -> None:
        """Compare what is here now with what each source says that it sent.

        Raises:
            WeightsVerificationError: with the pieces that do.
        """
        arrived = digest_pieces(
            self._plan, tensors, "target", rank=self._index, verify=verify, version=wanted
        )
        for source, note in notes.items():
            number, sent = pickle.loads(note)
            if number != wanted:
                raise _differs(source, f"sent version {number} where version {wanted} was asked for")
            mine = [one for one in arrived if one.source == source]
            if b"".join(one.digest for one in mine) != sent:
                compare(_as_sent(mine, sent), mine, source=source, target=self._index)
                raise _differs(source, f"sent {len(sent)} bytes of digests where {len(mine)} pieces came")

    def close(self) -> None:
        """Give everything back. May be called again, and by several threads."""
        with self._closing:
            self._shelf.given = {}
            for leg in self._legs:
                leg.end.close()
            if self._placed is not None:
                self._placed.close()
            part_meetings(self._order.key)


def _bytes_by_source(leg: ReceiveRoute) -> dict[int, int]:
    return {
        source: sum(slot.nbytes for bucket in stream for slot in bucket.slots)
        for source, stream in leg.buckets.items()
    }


def _as_sent(mine: list[PieceDigest], sent: bytes) -> list[PieceDigest]:
    """The source's digests, which come in the plan's order, with what they are of."""
    parts = [sent[at : at + _DIGEST_BYTES] for at in range(0, len(sent), _DIGEST_BYTES)]
    return [one._replace(digest=digest) for one, digest in zip(mine, parts, strict=False)]


def _differs(source: int, what: str) -> WeightsVerificationError:
    error = WeightsVerificationError(f"source rank {source} {what}; sync again")
    error.peer = f"source rank {source}"
    return error


def _reading(accepted: Accepted, given: Manifest | None) -> tuple[Reading, PlacedTensors | None]:
    """The tensors that are written: the role's own, or, for what is loaded, memory that is kept from sync to sync."""
    if accepted.load is None:
        return read(accepted), None
    if accepted.model is not None:
        own = read(accepted)
        manifest, names, like = own.manifest, list(own.tensors), own.tensors
    elif given is not None:
        manifest, names = given, [*(name for name, _ in given.items()), *(name for name, _ in given.ties)]
        like = {
            name: torch.empty(held.shape, dtype=dtype_named(held.dtype), device="meta")
            for name, held in given.items()
        }
    else:
        raise InternalError("a rank that loads all that the source has was not told what that is")
    twins = dict(manifest.ties)
    made, placed = _kept(accepted, {name: one for name, one in like.items() if name not in twins})
    return Reading(manifest, {name: made[twins.get(name, name)] for name in names}), placed


def _kept(accepted: Accepted, like: Tensors) -> tuple[Tensors, PlacedTensors | None]:
    if is_placed(accepted):
        placed = PlacedTensors(like)
        return placed.tensors, placed
    if accepted.memory is None:
        return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in like.items()}, None
    made = dict(accepted.memory(like))
    odd = [
        name
        for name, one in like.items()
        if name not in made or made[name].shape != one.shape or made[name].dtype != one.dtype
    ]
    if odd:
        raise DeclarationError(
            f"accept_weights(memory=) made no tensors of the right shape and type for {', '.join(sorted(odd)[:5])}"
        )
    return made, None


def hand_over(load: Load, tensors: Tensors) -> None:
    """Give everything to what loads it, and see to it that it took everything.

    Raises:
        WeightsError: it left some.
    """
    left = dict(tensors)

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            del left[name]
            yield name, tensor

    load(pairs())
    if left:
        raise WeightsError(
            f"{getattr(load, '__qualname__', load)} took {len(tensors) - len(left)} of {len(tensors)} tensors and "
            f"left {', '.join(sorted(left)[:5])}; load= must iterate over all that it is given before it returns"
        )
