"""A source rank's part of syncs."""

from __future__ import annotations

import contextlib
import hashlib
import pickle

import torch

from phalanx.errors import WeightsError
from phalanx.weights.bucket_packing import DeltaPacking
from phalanx.weights.digests import BoxDigest, digest_boxes
from phalanx.weights.tensors import Tensors, WriteWatch, device_of, read_slot
from phalanx.weights.transport import Deadline
from phalanx.weights.weight_registry import WeightRegistry
from phalanx.weights.weight_requests import ConnectRequest, Sent, SyncRequest
from phalanx.weights.weight_routes import current_tensors, make_routes, read_layout

_SYNCS = 16
"""Number of ``px.WeightSync`` objects whose samples a rank keeps. For an older one, all tensors count as changed."""
_SAMPLES = 512
"""Number of elements of a tensor that are compared to detect a change."""


class WeightSource:
    """Sends versions over the endpoints of a connection. After an error it is closed."""

    def __init__(self, registry: WeightRegistry, request: ConnectRequest, rank: int) -> None:
        self._registry = registry
        self._key = request.weights.key
        self._connection = request.connection
        self._rank = rank
        self.layout = read_layout(registry.published(self._key))
        self._plan = request.plan.of(source=rank)
        self._names = sorted({pair.source for batch in request.plan.batches for pair in batch.pairs})
        self._own_names = {pair.source for batch in self._plan.batches for pair in batch.pairs}
        device = device_of(self.layout.tensors)
        self._watch = WriteWatch({})
        self._number = 0
        self._routes = make_routes(request, "source", rank, device, self._check_unwritten)

    @property
    def address(self) -> object:
        """Address to which targets of the node connect; None if they need none."""
        addresses = (route.endpoint.address for route in self._routes)
        return next((address for address in addresses if address is not None), None)

    def send(self, sync: SyncRequest) -> Sent:
        """Send a version to all targets.

        Raises:
            WeightsError: if the weights are of another step or were written to, or a target was lost.
        """
        try:
            return self._send(sync)
        except BaseException:
            self.abort()
            raise

    def _send(self, sync: SyncRequest) -> Sent:
        published = self._registry.published(self._key)
        deltas = [route.packing for route in self._routes if isinstance(route.packing, DeltaPacking)]
        for packing in deltas:
            packing.begin(sync.known)
        step = None if published.step is None else int(published.step())
        tensors = current_tensors(published, self.layout.tensors)
        self._registry.publish(self._key, self._connection, sync.number, step, sync.step)
        self._watch, self._number = WriteWatch(tensors), sync.number
        deadline, nbytes = Deadline(sync.timeout), 0
        digests: list[BoxDigest] | None = None

        def note(target: int) -> bytes:
            """Return the version and the digest of each box for a target, in the plan's order."""
            nonlocal digests
            if digests is None:
                self._check_unwritten()
                digests = digest_boxes(
                    self._plan, tensors, "source", rank=self._rank, verify=sync.verify, version=sync.number
                )
            own = b"".join(digest.digest for digest in digests if target in digest.targets)
            return pickle.dumps((sync.number, own), 5)

        for route in self._routes:
            buckets = route.streams[self._rank]
            nbytes += route.endpoint.send(buckets, lambda slot: read_slot(tensors, slot), note, deadline)
        self._check_unwritten()
        for packing in deltas:
            packing.end(sync.number)
        changed = self._changes(tensors, sync)  # while the targets load
        self._check_unwritten()
        return Sent(nbytes, changed, step)

    def _check_unwritten(self) -> None:
        """Raise WeightsError if the tensors were written to since the sync began."""
        written = self._watch.written()
        if written:
            raise WeightsError(
                f"{len(written)} tensors were written to while version {self._number} was read from them: "
                f"{', '.join(written[:5])}. Let nothing train, load or optimize these weights during a sync"
            )

    def _changes(self, tensors: Tensors, sync: SyncRequest) -> bytes:
        """Return a byte for each name of the plan: whether this rank's values differ from the last version.

        The last version is that of the same ``px.WeightSync``: another one from this source has its own.
        """
        samples = self._registry.samples
        versions = samples.pop((self._key, sync.last.sync), {})
        before = versions.get(sync.last.number, {})
        now = {name: _sample(tensors[name]) for name in self._own_names} | versions.get(sync.number, {})
        samples[self._key, sync.last.sync] = {sync.last.number: before, sync.number: now}
        while len(samples) > _SYNCS:
            samples.pop(next(iter(samples)))
        changed = {name for name in self._own_names if before.get(name) != now[name]}
        return bytes(name in changed for name in self._names)

    def abort(self) -> None:
        """End a transfer that is waiting, and close."""
        self._close(aborts=True)

    def close(self) -> None:
        """Release connections and memory. May be called again."""
        self._close(aborts=False)

    def _close(self, *, aborts: bool) -> None:
        self._watch = WriteWatch({})
        for route in self._routes:
            with contextlib.suppress(OSError):
                if aborts:
                    route.endpoint.abort()
                else:
                    route.endpoint.close()


def _sample(tensor: torch.Tensor) -> bytes:
    """Return a digest of some elements, the same positions each time."""
    flat = tensor.detach()
    if tensor.numel() > _SAMPLES:
        step = tensor.numel() // _SAMPLES
        if flat.is_contiguous():
            flat = flat.reshape(-1)[::step]
        else:
            places = torch.arange(0, tensor.numel(), step, device=flat.device)
            flat = flat[torch.unravel_index(places, flat.shape)]
    values = flat.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(bytes(values.numpy()), digest_size=8).digest()
