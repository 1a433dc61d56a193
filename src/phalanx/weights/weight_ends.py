"""A rank's part of syncs: the ends that send its published weights, and receive its accepted weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from phalanx.declare.weight_declarations import Accepted, Load
from phalanx.display.text_format import first_of
from phalanx.errors import DeclarationError, WeightsError, WeightsVerificationError
from phalanx.tracing.spans import span as px_span
from phalanx.weights.buckets import BucketSlot, read_slot, write_slot
from phalanx.weights.digests import DIGEST_BYTES, BoxDigest, digest_boxes, tensor_digest
from phalanx.weights.local_layout import LocalLayout, current_tensors, model_of, named_tensors, read_layout
from phalanx.weights.manifest import Manifest, Tensors, dtype_named
from phalanx.weights.shared_memory import HostMemory, allocate_tensors, location_of
from phalanx.weights.transport_interface import ConnectRequest, Deadline, Outgoing, Sent, SyncRequest, lost
from phalanx.weights.transports import STORAGE, make_endpoints
from phalanx.weights.versions import WeightRegistry

_SMALL = 1 << 16
"""Maximum elements of a tensor that is compared in full to detect a change. Larger tensors are sampled."""


class WeightEnd:
    """The endpoints of a rank on a side of a connection. They have to be closed after an error.

    Attributes:
        layout: the layout that the plan was made for, without tensors: their memory may be freed between syncs.
    """

    def __init__(
        self, registry: WeightRegistry, request: ConnectRequest, rank: int, layout: LocalLayout
    ) -> None:
        self._registry, self._rank = registry, rank
        self._key, self._connection = request.key, request.connection
        self._plan = request.plan.of(request.side, rank)
        self.layout = layout._replace(tensors={})
        self._endpoints = make_endpoints(request, rank, layout.device)
        self._memory: HostMemory | None = None

    def close(self) -> None:
        """Release connections and memory, and end a transfer that is waiting on any thread. May be called again."""
        for part in (*self._endpoints, self._memory):
            with contextlib.suppress(Exception):  # the device may have failed: the first error counts
                if part is not None:
                    part.close()


class WeightSource(WeightEnd):
    """The source end of a connection, which sends versions."""

    def __init__(self, registry: WeightRegistry, request: ConnectRequest, rank: int) -> None:
        super().__init__(registry, request, rank, read_layout(registry.published(request.key)))
        self._names = sorted({pair.source for batch in request.plan.batches for pair in batch.pairs})
        self._own_names = {pair.source for batch in self._plan.batches for pair in batch.pairs}
        #: The version that was sent last, and digests of its tensors. At first, all tensors count as changed.
        self._sent = 0
        self._samples: dict[str, bytes] = {}

    @property
    def address(self) -> object:
        """Address that targets of the node connect to; None if they need none."""
        return next((one.address for one in self._endpoints if one.address), None)

    def tensors(self) -> Tensors:
        """Return the current tensors by name."""
        return current_tensors(self._registry.published(self._key), self.layout)

    def send(self, sync: SyncRequest) -> Sent:
        """Send a version to all targets.

        Raises:
            WeightsError: if the weights are of another step or were written to, or a target was lost.
        """
        published = self._registry.published(self._key)
        step = None if published.step is None else int(published.step())
        tensors = self.tensors()
        self._registry.publish(self._key, sync.number, step, sync.step)
        # torch counts writes in place; digests detect writes through .data, from outside of torch and in inference mode
        watched = {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}

        def check() -> None:
            written = sorted(name for name, count in watched.items() if tensors[name]._version != count)
            if written:
                raise WeightsError(
                    f"{len(written)} tensors were written to while version {sync.number} was read from them: "
                    f"{', '.join(written[:5])}. Let nothing train, load or optimize these weights during a sync"
                )

        @functools.cache
        def digests() -> Mapping[int, list[BoxDigest]]:
            check()
            return digest_boxes(self._plan, tensors, "source", verify=sync.verify, version=sync.number)

        def note(target: int) -> bytes:
            """Return the version and the digest of each box for a target, in the plan's order."""
            own = (digest for *_, digest in digests().get(target, ()))
            return sync.number.to_bytes(DIGEST_BYTES, "little") + b"".join(own)

        version = Outgoing(lambda slot: read_slot(tensors, slot), note, check)
        deadline = Deadline(sync.timeout)
        for endpoint in self._endpoints:
            endpoint.packing.known = self._sent
        nbytes = sum(endpoint.send(version, deadline) for endpoint in self._endpoints)
        changed = self._changes(tensors)  # while the targets load
        check()
        self._sent = sync.number
        return Sent(nbytes, changed, step)

    def _changes(self, tensors: Tensors) -> bytes:
        """Return a byte for each name of the plan: 1 if this rank's values differ from the version sent before."""
        before, self._samples = self._samples, {name: _sample(tensors[name]) for name in self._own_names}
        return bytes(before.get(name) != self._samples.get(name) for name in self._names)


def _sample(tensor: torch.Tensor) -> bytes:
    """Return a digest of a tensor or, if it is large, of a sample of the same elements each time."""
    return tensor_digest(tensor, verify="full" if tensor.numel() <= _SMALL else "sampled")


class WeightTarget(WeightEnd):
    """The target end of a connection, which receives versions."""

    def __init__(self, registry: WeightRegistry, request: ConnectRequest, rank: int) -> None:
        accepted = registry.accepted(request.key)
        layout, memory = _target_layout(accepted, request.complete)
        self._shared: WeightSource | None = None
        if STORAGE in request.transports.values():
            self._shared = registry.ends[request.connection].get("source")
            share_storage(self._shared, accepted, layout)
            layout = read_layout(accepted)  # the tensors have other storage now
        super().__init__(registry, request, rank, layout)
        self._memory, self._loaded = memory, layout.tensors if memory else {}
        for endpoint in self._endpoints:
            if memory and endpoint.readers == [rank] and not endpoint.packing.varies:
                endpoint.location = location_of(layout.tensors)

    def receive(self, sync: SyncRequest) -> None:
        """Receive a version into the role's parameters, or pass it to its ``load`` function.

        Raises:
            WeightsTransferError: if a source was lost.
            WeightsVerificationError: if the tensors differ from the source's.
        """
        registry, key, number = self._registry, self._key, sync.number
        accepted = registry.accepted(key)
        known = registry.arrived_over(key, self._connection)
        if self._shared is not None:  # the source may have other memory, as after a move to the CPU and back
            share_storage(self._shared, accepted, self.layout)
        tensors = current_tensors(accepted, self.layout) if accepted.load is None else self._loaded

        def write(slot: BucketSlot) -> torch.Tensor:
            if accepted.load is None:
                registry.begin(key, number)  # the role's weights may be partly updated from now on
            return write_slot(tensors, slot)

        deadline, notes = Deadline(sync.timeout), dict[int, bytes]()
        for endpoint in self._endpoints:
            endpoint.packing.known = known
            attributes = {"weights version": number, "transport": endpoint.transport}
            with px_span(f"weights {key[1]!r}", **attributes):
                notes |= endpoint.receive(write, deadline)
        arrived = digest_boxes(self._plan, tensors, "target", verify=sync.verify, version=number)
        for source, note in notes.items():
            self._verify(f"source rank {source}", number, note, arrived.get(source, []))
        for name, twin in self._plan.copies:  # tied at the source, but not here
            if name in tensors and twin in tensors:
                tensors[twin].copy_(tensors[name])
        registry.begin(key, number)
        if accepted.load is not None:
            load_all(accepted.load, tensors)
        registry.finish(key, number, self._connection)

    def _verify(self, peer: str, number: int, note: bytes, own: Sequence[BoxDigest]) -> None:
        """Compare the version and the digests of the received boxes with the note of a source."""
        head, *parts = (note[at : at + DIGEST_BYTES] for at in range(0, len(note), DIGEST_BYTES))
        if (sent := int.from_bytes(head, "little")) != number:
            problem = f"{peer} sent version {sent}, expected version {number}; sync again"
            raise lost(peer, problem, WeightsVerificationError)
        compared = zip(own, parts, strict=True)
        wrong = sorted(f"{name} {box}" for (name, box, digest), part in compared if digest != part)
        if wrong:
            raise lost(
                peer,
                f"{len(wrong)} of {len(own)} boxes from {peer} on target rank {self._rank} differ from the sent "
                f"values: {first_of(wrong, 5)}. These tensors were written to during the sync, on either side, or "
                "were damaged on the way: let nothing write to weights while they are synced",
                WeightsVerificationError,
            )


def share_storage(source: WeightSource | None, accepted: Accepted, layout: LocalLayout) -> None:
    """Make the accepted tensors views of the source's storage: a sync then only marks the version.

    Raises:
        DeclarationError: if layouts, types or names differ, so that a copy is needed, the rank has no source role, or
            the weights were accepted without ``share=True``.
    """
    if source is None or not accepted.share:
        raise DeclarationError(
            "accept_weights(..., share=True) is for roles of one process: this rank has no source role, or "
            "does not share its storage; accept the weights without share=True, which copies"
        )
    ours, own = source.layout.held, layout.held.keys() - layout.ties.keys()
    target, tensors = named_tensors(model_of(accepted)), source.tensors()
    odd = sorted(
        name for name in own if ours.get(name) != layout.held[name] or isinstance(target[name], DTensor)
    )
    if odd:
        raise DeclarationError(
            "share=True needs plain tensors of the source's layout and types, and no DTensors, whose storage FSDP2 "
            f"keeps; others are {', '.join(odd[:5])}: accept the weights without share=True, which copies"
        )
    for name in layout.held:
        target[name].data = tensors[layout.ties.get(name, name)]


def _target_layout(accepted: Accepted, complete: Manifest) -> tuple[LocalLayout, HostMemory | None]:
    """Return the tensors to write: the role's own or, for a ``load`` function, tensors in memory of this library.

    The memory is kept from sync to sync, and processes of an engine may open it.

    Raises:
        DeclarationError: if a tensor cannot be written, since it has no memory or its elements share memory.
    """
    if accepted.load is None:
        layout = read_layout(accepted)
        for name, tensor in layout.tensors.items():
            if not accepted.share and (tensor.is_meta or torch._debug_has_internal_overlap(tensor) == 1):
                text = "is on the meta device, or its elements share memory (expand()); accept a dense tensor in memory"
                raise DeclarationError(f"{name} cannot be written by a sync: it {text}")
        return layout, None
    if accepted.model is not None:
        held, ties, like = read_layout(accepted)
    else:
        held, ties = dict(complete.items()), dict(complete.ties)
        like = {
            name: torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device="meta")
            for name, tensor in held.items()
        }
    memory, tensors = allocate_tensors({name: tensor for name, tensor in like.items() if name not in ties})
    return LocalLayout(held, ties, {name: tensors[ties.get(name, name)] for name in (*like, *ties)}), memory


def load_all(load: Load, tensors: Tensors) -> None:
    """Pass all tensors to the function that loads them.

    Raises:
        WeightsError: if the function left some.
    """
    pairs = iter(tensors.items())
    load(pairs)
    if left := sorted(name for name, _ in pairs):
        raise WeightsError(
            f"{getattr(load, '__qualname__', load)} took {len(tensors) - len(left)} of {len(tensors)} tensors and "
            f"left {', '.join(left[:5])}; load= must iterate over all tensors before it returns"
        )
