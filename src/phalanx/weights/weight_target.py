"""A target rank's part of syncs."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Mapping

import torch

from phalanx.declare.weight_declarations import Accepted, Load
from phalanx.errors import DeclarationError, InternalError, WeightsError, WeightsVerificationError
from phalanx.tracing.spans import span as px_span
from phalanx.weights.bucket_packing import DeltaPacking
from phalanx.weights.buckets import Slot
from phalanx.weights.digests import DIGEST_BYTES, digest_boxes
from phalanx.weights.local_layout import LocalLayout, named_tensors
from phalanx.weights.manifest import Manifest
from phalanx.weights.process_copy import share_storage
from phalanx.weights.shared_memory import SharedTensors
from phalanx.weights.tensors import Tensors, copy_ties, device_of, dtype_named, write_slot
from phalanx.weights.transport import STORAGE, Deadline
from phalanx.weights.weight_registry import WeightRegistry
from phalanx.weights.weight_requests import Arrived, ConnectRequest, SyncRequest
from phalanx.weights.weight_routes import Route, current_tensors, make_routes, model_of, read_layout


class WeightTarget:
    """Receives versions over the endpoints of a connection. After an error it is closed.

    Args:
        registry: weights of the rank.
        request: the connection.
        rank: rank of the target in the plan.
        source: layout of the source role of this rank, if it has one.
    """

    def __init__(
        self, registry: WeightRegistry, request: ConnectRequest, rank: int, source: LocalLayout | None
    ) -> None:
        self._registry = registry
        self._key = request.weights.key
        self._connection = request.connection
        self._rank = rank
        self._plan = request.plan.of(target=rank)
        accepted = registry.accepted(self._key)
        self._layout, self._shared = _target_layout(accepted, request.complete)
        if source is not None and STORAGE in request.transports.values():
            manifests = source.manifest, self._layout.manifest
            share_storage(source.tensors, named_tensors(model_of(accepted)), manifests)
        self._torn_by: int | None = None
        self._routes = make_routes(request, "target", rank, device_of(self._layout.tensors))
        try:
            for route in self._routes:
                route.endpoint.connect(Deadline(request.timeout))
        except BaseException:
            self.close()
            raise

    def receive(self, sync: SyncRequest) -> Arrived:
        """Receive a version into the role's parameters, or pass it to the function that loads it.

        Raises:
            WeightsTransferError: if a source was lost.
            WeightsVerificationError: if the tensors differ from the source's.
        """
        began = time.perf_counter()
        try:
            accepted = self._registry.accepted(self._key)
            deltas = [route.packing for route in self._routes if isinstance(route.packing, DeltaPacking)]
            for packing in deltas:
                packing.begin(self._registry.arrived_over(self._key, self._connection))
            tensors: Tensors = self._layout.tensors
            if accepted.load is None:
                tensors = current_tensors(accepted, tensors)
            nbytes = self._receive(sync, tensors, writes_model=accepted.load is None)
            self._begin(sync)
            if accepted.load is not None:
                load_all(accepted.load, tensors)
            self._registry.finish(self._key, sync.number, self._connection)
            for packing in deltas:
                packing.end(sync.number)
        except BaseException:
            self.abort()
            raise
        by_source = tuple(
            (source, route.transport, count)
            for route in self._routes
            for source, count in _bytes_by_source(route).items()
        )
        return Arrived(nbytes, time.perf_counter() - began, by_source)

    def _begin(self, sync: SyncRequest) -> None:
        """Note that the role's weights may be partly updated from now on."""
        if self._torn_by != sync.number:
            self._registry.begin(self._key, sync.number)
            self._torn_by = sync.number

    def _receive(self, sync: SyncRequest, tensors: Tensors, *, writes_model: bool) -> int:
        def write(slot: Slot) -> torch.Tensor:
            if writes_model:
                self._begin(sync)
            return write_slot(tensors, slot)

        deadline, nbytes, notes = Deadline(sync.timeout), 0, dict[int, bytes]()
        for route in self._routes:
            sources = {f"bytes from rank {source}": n for source, n in _bytes_by_source(route).items()}
            attributes = {"weights version": sync.number, "mover": route.transport, **sources}
            with px_span(f"weights {self._key[1]!r}", **attributes):
                received = route.endpoint.receive(route.streams, write, deadline)
            nbytes += received.nbytes
            notes |= received.notes
        self._verify(sync, tensors, notes)
        copy_ties(self._plan, tensors)
        return nbytes

    def _verify(self, sync: SyncRequest, tensors: Tensors, notes: Mapping[int, bytes]) -> None:
        """Compare the tensors with the digests of each source.

        Raises:
            WeightsVerificationError: if some differ; the message names them.
        """
        arrived = digest_boxes(
            self._plan, tensors, "target", rank=self._rank, verify=sync.verify, version=sync.number
        )
        for source, note in notes.items():
            number, sent = pickle.loads(note)
            own = [digest for digest in arrived if digest.source == source]
            parts = [sent[at : at + DIGEST_BYTES] for at in range(0, len(sent), DIGEST_BYTES)]
            if number != sync.number or len(parts) != len(own):
                problem = f"sent {len(parts)} boxes of version {number}, expected {len(own)} of {sync.number}"
                raise _differs(source, f"source rank {source} {problem}; sync again")
            wrong = sorted(
                digest.label for digest, part in zip(own, parts, strict=True) if digest.digest != part
            )
            if wrong:
                labels = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
                raise _differs(
                    source,
                    f"{len(wrong)} of {len(own)} pieces from source rank {source} are not on target rank {self._rank} "
                    f"what was sent: {labels}. These tensors were written to during the sync, on either side, or were "
                    "damaged on the way: let nothing write to weights while they are synced",
                )

    def abort(self) -> None:
        """End a transfer that is waiting, and close."""
        for route in self._routes:
            route.endpoint.abort()
        self.close()

    def close(self) -> None:
        """Release connections and memory. May be called again."""
        for route in self._routes:
            route.endpoint.close()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()


def _bytes_by_source(route: Route) -> dict[int, int]:
    return {
        source: sum(slot.nbytes for bucket in stream for slot in bucket.slots)
        for source, stream in route.streams.items()
    }


def _differs(source: int, message: str) -> WeightsVerificationError:
    error = WeightsVerificationError(message)
    error.peer = f"source rank {source}"
    return error


def _target_layout(accepted: Accepted, complete: Manifest | None) -> tuple[LocalLayout, SharedTensors | None]:
    """Return the tensors to write: the role's own, or, if they are loaded, tensors kept from sync to sync."""
    if accepted.load is None:
        return read_layout(accepted), None
    if accepted.model is not None:
        own = read_layout(accepted)
        manifest, names, like = own.manifest, list(own.tensors), own.tensors
    elif complete is not None:
        manifest = complete
        names = [*(name for name, _ in complete.items()), *(name for name, _ in complete.ties)]
        like = {
            name: torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device="meta")
            for name, tensor in complete.items()
        }
    else:
        raise InternalError("a rank that loads all tensors of the source has no manifest of them")
    ties = dict(manifest.ties)
    tensors, shared = _kept_tensors(accepted, {name: like[name] for name in like if name not in ties})
    return LocalLayout(manifest, {name: tensors[ties.get(name, name)] for name in names}), shared


def _kept_tensors(accepted: Accepted, like: Tensors) -> tuple[Tensors, SharedTensors | None]:
    if accepted.memory is None:
        if not hasattr(os, "memfd_create"):
            return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in like.items()}, None
        shared = SharedTensors(like)  # which other processes of an engine may open
        return shared.tensors, shared
    tensors = dict(accepted.memory(like))
    odd = [
        name
        for name, wanted in like.items()
        if name not in tensors or tensors[name].shape != wanted.shape or tensors[name].dtype != wanted.dtype
    ]
    if odd:
        raise DeclarationError(
            f"accept_weights(memory=) made no tensors of the right shape and type for {', '.join(sorted(odd)[:5])}"
        )
    return tensors, None


def load_all(load: Load, tensors: Tensors) -> None:
    """Pass all tensors to the function that loads them.

    Raises:
        WeightsError: if it left some.
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
            f"left {', '.join(sorted(left)[:5])}; load= must iterate over all tensors before it returns"
        )
