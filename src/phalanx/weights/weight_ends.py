"""A rank's part of syncs: the ends that send its published weights, and receive its accepted weights."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from phalanx.declare.weight_declarations import Accepted, Load
from phalanx.errors import DeclarationError, WeightsError, WeightsTransferError, WeightsVerificationError
from phalanx.tracing.spans import span as px_span
from phalanx.weights.buckets import (
    Bucket,
    DeltaPacking,
    Packing,
    Slot,
    buckets_from,
    buckets_to,
    read_slot,
    write_slot,
)
from phalanx.weights.digests import DIGEST_BYTES, digest_boxes, tensor_digest
from phalanx.weights.local_layout import (
    LocalLayout,
    current_tensors,
    model_of,
    named_tensors,
    odd_tensors,
    read_layout,
)
from phalanx.weights.manifest import Manifest
from phalanx.weights.plan import Locality
from phalanx.weights.process_group import ProcessGroupEndpoint
from phalanx.weights.ring import RingReceiver, RingSender
from phalanx.weights.shared_memory import SharedTensors
from phalanx.weights.tensors import Tensors, copy_ties, device_of, dtype_named
from phalanx.weights.transport_interface import (
    COPY,
    CUDA_IPC,
    GLOO,
    NCCL,
    STORAGE,
    WITH_DELTAS,
    CopyEndpoint,
    Deadline,
    Endpoint,
    Outgoing,
    lost,
)
from phalanx.weights.versions import WeightRegistry
from phalanx.weights.weight_requests import ConnectRequest, Sent, SyncRequest

_RING_BUCKET_BYTES = 16 << 20
"""Maximum bucket on a node. Larger copies are not faster, and the first write of the ring is slower than any copy."""
_LEAST_BUCKET_BYTES = 4096
_ORDER = (Locality.REMOTE, Locality.NODE, Locality.PROCESS)
"""Order in which both sides work, so that no two ranks wait for each other crosswise."""
_CONNECT_S = 60.0
_NUMBER_BYTES = 8
_SMALL = 1 << 16
"""Number of elements of a tensor up to which all of them are compared to detect a change."""


class WeightEnd:
    """The endpoints of a side of a rank for a connection. They have to be closed after an error.

    Attributes:
        layout: the tensors that the plan was made for.
    """

    def __init__(
        self, registry: WeightRegistry, request: ConnectRequest, rank: int, layout: LocalLayout
    ) -> None:
        self._registry = registry
        self._key = request.key
        self._connection = request.connection
        self._rank = rank
        self.layout = layout
        self._endpoints = make_endpoints(request, rank, device_of(layout.tensors))

    def close(self) -> None:
        """Release connections and memory, and end a transfer that is waiting on any thread. May be called again."""
        for endpoint in self._endpoints:
            with contextlib.suppress(OSError):
                endpoint.close()


class WeightSource(WeightEnd):
    """Sends versions over the endpoints of a connection."""

    def __init__(self, registry: WeightRegistry, request: ConnectRequest, rank: int) -> None:
        super().__init__(registry, request, rank, read_layout(registry.published(request.key)))
        self._plan = request.plan.of(source=rank)
        self._names = sorted({pair.source for batch in request.plan.batches for pair in batch.pairs})
        self._own_names = {pair.source for batch in self._plan.batches for pair in batch.pairs}
        #: Digests of the tensors by version. Over a new connection, all tensors count as changed.
        self._samples: dict[int | None, dict[str, bytes]] = {}

    @property
    def address(self) -> object:
        """Address to which targets of the node connect; None if they need none."""
        addresses = (endpoint.address for endpoint in self._endpoints)
        return next((address for address in addresses if address is not None), None)

    def send(self, sync: SyncRequest) -> Sent:
        """Send a version to all targets.

        Raises:
            WeightsError: if the weights are of another step or were written to, or a target was lost.
        """
        published = self._registry.published(self._key)
        for endpoint in self._endpoints:
            endpoint.packing.begin(sync.known)
        step = None if published.step is None else int(published.step())
        tensors = current_tensors(published, self.layout.tensors)
        self._registry.publish(self._key, self._connection, sync.number, step, sync.step)
        # torch counts writes in place; digests detect writes through .data, from outside of torch and in inference mode
        watched = {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}
        deadline = Deadline(sync.timeout)
        digests: Mapping[int, list[tuple[str, bytes]]] | None = None

        def check() -> None:
            written = sorted(name for name, count in watched.items() if tensors[name]._version != count)
            if written:
                raise WeightsError(
                    f"{len(written)} tensors were written to while version {sync.number} was read from them: "
                    f"{', '.join(written[:5])}. Let nothing train, load or optimize these weights during a sync"
                )

        def note(target: int) -> bytes:
            """Return the version and the digest of each box for a target, in the plan's order."""
            nonlocal digests
            if digests is None:
                check()
                digests = digest_boxes(self._plan, tensors, "source", verify=sync.verify, version=sync.number)
            own = (digest for _, digest in digests.get(target, ()))
            return sync.number.to_bytes(_NUMBER_BYTES, "little") + b"".join(own)

        version = Outgoing(lambda slot: read_slot(tensors, slot), note, check)
        nbytes = sum(endpoint.send(version, deadline) for endpoint in self._endpoints)
        check()
        for endpoint in self._endpoints:
            endpoint.packing.end(sync.number)
        changed = self._changes(tensors, sync)  # while the targets load
        check()
        return Sent(nbytes, changed, step)

    def _changes(self, tensors: Tensors, sync: SyncRequest) -> bytes:
        """Return a byte for each name of the plan: whether this rank's values differ from the last version."""
        before = self._samples.get(sync.last, {})
        now = {name: _sample(tensors[name]) for name in self._own_names}
        self._samples = {sync.last: before, sync.number: now}
        changed = {name for name in self._own_names if before.get(name) != now[name]}
        return bytes(name in changed for name in self._names)


def _sample(tensor: torch.Tensor) -> bytes:
    """Return a digest of a tensor or, if it is large, of the same of its elements each time."""
    return tensor_digest(tensor, verify="full" if tensor.numel() <= _SMALL else "sampled")


class WeightTarget(WeightEnd):
    """Receives versions over the endpoints of a connection.

    Args:
        registry: weights of the rank.
        request: the connection.
        rank: rank of the target in the plan.
        source: layout of the source role of this rank, if it has one.
    """

    def __init__(
        self, registry: WeightRegistry, request: ConnectRequest, rank: int, source: LocalLayout | None
    ) -> None:
        accepted = registry.accepted(request.key)
        layout, self._shared = _target_layout(accepted, request.complete)
        if source is not None and STORAGE in request.transports.values():
            share_storage(source, accepted, layout.manifest)
        super().__init__(registry, request, rank, layout)
        self._plan = request.plan.of(target=rank)

    def connect(self) -> None:
        """Connect to the sources of the node.

        Raises:
            WeightsTransferError: if a source cannot be reached.
        """
        for endpoint in self._endpoints:
            endpoint.connect(Deadline(_CONNECT_S))

    def receive(self, sync: SyncRequest) -> float:
        """Receive a version into the role's parameters, or pass it to the function that loads it; return the seconds.

        Raises:
            WeightsTransferError: if a source was lost.
            WeightsVerificationError: if the tensors differ from the source's.
        """
        began = time.perf_counter()
        registry, key = self._registry, self._key
        accepted = registry.accepted(key)
        known = registry.arrived_over(key, self._connection)
        tensors: Tensors = self.layout.tensors
        if accepted.load is None:
            tensors = current_tensors(accepted, tensors)

        has_begun = accepted.load is not None

        def write(slot: Slot) -> torch.Tensor:
            nonlocal has_begun
            if not has_begun:  # the role's weights may be partly updated from now on
                registry.begin(key, sync.number)
                has_begun = True
            return write_slot(tensors, slot)

        deadline, notes = Deadline(sync.timeout), dict[int, bytes]()
        for endpoint in self._endpoints:
            endpoint.packing.begin(known)
            counts = endpoint.bytes_by_source().items()
            sources = {f"bytes from rank {source}": nbytes for source, nbytes in counts}
            attributes = {"weights version": sync.number, "transport": endpoint.transport, **sources}
            with px_span(f"weights {key[1]!r}", **attributes):
                notes |= endpoint.receive(write, deadline)
        self._verify(sync, tensors, notes)
        copy_ties(self._plan, tensors)
        registry.begin(key, sync.number)
        if accepted.load is not None:
            load_all(accepted.load, tensors)
        registry.finish(key, sync.number, self._connection)
        for endpoint in self._endpoints:
            endpoint.packing.end(sync.number)
        return time.perf_counter() - began

    def _verify(self, sync: SyncRequest, tensors: Tensors, notes: Mapping[int, bytes]) -> None:
        """Compare the tensors with the digests of each source.

        Raises:
            WeightsVerificationError: if some differ; the message names them.
        """
        arrived = digest_boxes(self._plan, tensors, "target", verify=sync.verify, version=sync.number)
        for source, note in notes.items():
            peer, own = f"source rank {source}", arrived.get(source, [])
            number, sent = int.from_bytes(note[:_NUMBER_BYTES], "little"), note[_NUMBER_BYTES:]
            if number != sync.number:
                problem = f"sent version {number}, expected version {sync.number}"
                raise lost(peer, f"{peer} {problem}; sync again", WeightsVerificationError)
            parts = [sent[at : at + DIGEST_BYTES] for at in range(0, len(sent), DIGEST_BYTES)]
            wrong = sorted(label for (label, digest), part in zip(own, parts, strict=True) if digest != part)
            if wrong:
                labels = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
                raise lost(
                    peer,
                    f"{len(wrong)} of {len(own)} pieces from {peer} are not on target rank {self._rank} what was "
                    f"sent: {labels}. These tensors were written to during the sync, on either side, or were damaged "
                    "on the way: let nothing write to weights while they are synced",
                    WeightsVerificationError,
                )

    def close(self) -> None:
        super().close()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()


def share_storage(source: LocalLayout, accepted: Accepted, manifest: Manifest) -> None:
    """Make the accepted tensors views of the source's storage: a sync then only marks the version.

    Args:
        source: layout of the source role of this process.
        accepted: the weights whose tensors are changed.
        manifest: their manifest.

    Raises:
        DeclarationError: if layouts, types or names differ, so that a copy is needed.
    """
    ours, theirs = dict(source.manifest.items()), dict(manifest.items())
    odd = sorted(name for name, tensor in theirs.items() if ours.get(name) != tensor)
    if odd:
        raise DeclarationError(
            f"share=True needs the source's layout and types, but {', '.join(odd[:5])} differ: accept the weights "
            "without share=True, which copies"
        )
    ties, target = dict(manifest.ties), named_tensors(model_of(accepted))
    for name in (*theirs, *ties):
        target[name].data = source.tensors[ties.get(name, name)].detach()


def _target_layout(accepted: Accepted, complete: Manifest) -> tuple[LocalLayout, SharedTensors | None]:
    """Return the tensors to write: the role's own, or, if they are loaded, tensors kept from sync to sync."""
    if accepted.load is None:
        return read_layout(accepted), None
    if accepted.model is not None:
        manifest, like = read_layout(accepted)
    else:
        manifest = complete
        like = {
            name: torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device="meta")
            for name, tensor in complete.items()
        }
    ties = dict(manifest.ties)
    wanted = {name: tensor for name, tensor in like.items() if name not in ties}
    shared = None
    if accepted.memory is None:
        shared = SharedTensors.create(wanted)  # processes of an engine may open it
        tensors = shared.tensors
    else:
        tensors = dict(accepted.memory(wanted))
        odd = sorted(odd_tensors(tensors, wanted))
        if odd:
            raise DeclarationError(
                f"accept_weights(memory=) made no tensors of the right shape and type for {', '.join(odd[:5])}"
            )
    names = dict.fromkeys((*like, *ties))
    return LocalLayout(manifest, {name: tensors[ties.get(name, name)] for name in names}), shared


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
