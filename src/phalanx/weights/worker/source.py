"""A source rank's part of syncs."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from phalanx.declare.weight_declarations import Published
from phalanx.errors import WeightsError
from phalanx.weights.planning.digests import PieceDigest, digest_pieces
from phalanx.weights.planning.locality import Hop
from phalanx.weights.planning.resharding_plan import Plan
from phalanx.weights.planning.tensors import Tensors, Watch, read_slot
from phalanx.weights.transports.ring import RingSource
from phalanx.weights.transports.shared_segment import PlacedSource
from phalanx.weights.worker.bucket_store import OnShelf, RankShelf
from phalanx.weights.worker.weight_registry import Key, WeightRegistry
from phalanx.weights.worker.weight_requests import ConnectRequest, Sent, SyncRequest
from phalanx.weights.worker.weight_routes import (
    SendRoute,
    closed_by_errors,
    part_meetings,
    read,
    readers_of,
    refreshed,
    source_legs,
    watch,
)

__all__ = ["SourceRank", "changed_count"]

_SYNCS = 16
"""Of how many syncs a rank keeps what it sent last: of one that is older all counts as changed again."""
_SAMPLES = 512
"""Elements of a tensor that tell whether it changed; of a smaller one all."""


class SourceRank:
    """Sends versions over the ends that it makes for a plan. After an error it is closed, and another must be made."""

    def __init__(self, book: WeightRegistry, order: ConnectRequest, index: int, shelf: RankShelf) -> None:
        self._book = book
        self._key: Key = (order.asked.role, order.asked.name)
        self._order = order
        self._index = index
        self._shelf = shelf
        self.reading = read(book.published(self._key))
        self._plan = order.plan.of(source=index)
        self._legs = source_legs(order, index, shelf)
        self._deltas = [leg.deltas for leg in self._legs if leg.deltas is not None]
        self._names = _source_names(order.plan)
        self._mine = _source_names(self._plan)
        self._beside = sum(len(readers_of(leg.buckets)) for leg in self._legs if leg.hop is Hop.PROCESS)
        self._begun: _Sending | None = None

    @property
    def address(self) -> str:
        """Where targets of its node reach it; empty where they do not."""
        ends = (leg.end for leg in self._legs)
        return next((end.address for end in ends if isinstance(end, RingSource | PlacedSource)), "")

    def store(self, sync: SyncRequest) -> OnShelf:
        """Begin a version: put into the object store what goes through that."""
        with closed_by_errors(self):
            self._shelf.mine = OnShelf()
            self._begun = self._begin(sync)
            self._begun.send(leg for leg in self._legs if self._is_stored(leg))
            return self._shelf.handed_over()

    def send(self, sync: SyncRequest) -> Sent:
        """Send a version; what :meth:`store` has sent of it is not sent again."""
        with closed_by_errors(self):
            sending, self._begun = self._begun, None
            if sending is None or sending.sync.number != sync.number:
                sending = self._begin(sync)
            watch(self._order.key, self._index, self._beside, sending.check_unwritten)
            sending.send(leg for leg in self._legs if not self._is_stored(leg))
            for deltas in self._deltas:
                deltas.end(sync.number)
            return sending.ended()

    def _begin(self, sync: SyncRequest) -> _Sending:
        published = self._book.published(self._key)
        for deltas in self._deltas:
            deltas.begin(sync.known)
        step = _step_of(published)
        tensors = refreshed(published, self.reading)
        self._book.publish(self._key, sync.key, sync.number, step, sync.step)
        return _Sending(self._plan, tensors, sync, self._index, step, lambda: self._changes(tensors, sync))

    def _changes(self, tensors: Tensors, sync: SyncRequest) -> bytes:
        """A bit for each name of the plan: whether this rank's values are others than in the version before.

        That is the last one that arrived whole through the same sync: another one from this source has its own.
        """
        versions = self._book.seen.get((self._key, sync.since.link), {})
        before, now = versions.get(sync.since.number, {}), dict(versions.get(sync.number, {}))
        now |= {name: _glance(tensors[name]) for name in self._mine if name not in now}
        self._book.seen[self._key, sync.since.link] = {sync.since.number: before, sync.number: now}
        while len(self._book.seen) > _SYNCS:
            self._book.seen.pop(next(iter(self._book.seen)))
        changed = {name for name in self._mine if before.get(name) != now[name]}
        return bytes(name in changed for name in self._names)

    def _is_stored(self, leg: SendRoute) -> bool:
        return self._order.movers[leg.hop] == "store"

    def close(self) -> None:
        """Give everything back. May be called again."""
        self._begun = None
        self._shelf.mine = OnShelf()
        for leg in self._legs:
            leg.end.close()
        part_meetings(self._order.key)


class _Sending:
    """One version on its way."""

    def __init__(
        self,
        plan: Plan,
        tensors: Tensors,
        sync: SyncRequest,
        rank: int,
        step: int | None,
        changes: Callable[[], bytes],
    ) -> None:
        self.sync = sync
        self._plan = plan
        self._tensors = tensors
        self._rank = rank
        self._step = step
        self._changes = changes
        self._watch = Watch(tensors)
        self._digests: list[PieceDigest] | None = None
        self._nbytes = 0
        self._seconds = 0.0

    def send(self, legs: Iterable[SendRoute]) -> None:
        """Send what goes over these legs."""
        began = time.perf_counter()
        for leg in legs:
            self._nbytes += leg.end.send(
                leg.buckets,
                lambda slot: read_slot(self._tensors, slot),
                timeout=self.sync.timeout,
                note=self._note,
            )
        self.check_unwritten()
        self._seconds += time.perf_counter() - began

    def _note(self, target: int) -> bytes:
        """What a target compares with what came to it: the version, and a digest of each piece in the plan's order."""
        if self._digests is None:
            self.check_unwritten()
            self._digests = digest_pieces(
                self._plan,
                self._tensors,
                "source",
                rank=self._rank,
                verify=self.sync.verify,
                version=self.sync.number,
            )
        digests = b"".join(one.digest for one in self._digests if target in one.targets)
        return pickle.dumps((self.sync.number, digests), 5)

    def check_unwritten(self) -> None:
        """Raise WeightsError if the tensors were written to since this began."""
        written = self._watch.written()
        if written:
            raise WeightsError(
                f"{len(written)} tensors were written to while version {self.sync.number} was read from them: "
                f"{', '.join(written[:5])}. Let nothing train, load or optimise these weights during a sync"
            )

    def ended(self) -> Sent:
        """What was done. What has changed is looked for now, while the targets are at what they do with it.

        Raises:
            WeightsError: the source's tensors were written to in the meantime.
        """
        changed = self._changes()
        self.check_unwritten()
        return Sent(self._nbytes, self._seconds, changed, self._step)


def _step_of(published: Published) -> int | None:
    return None if published.step is None else int(published.step())


def _source_names(plan: Plan) -> tuple[str, ...]:
    return tuple(sorted({pair.source for lane in plan.lanes for pair in lane.pairs}))


def changed_count(sent: Sequence[Sent]) -> int:
    """Of how many tensors some source sent other values than the last time."""
    marks = [one.changed for one in sent if one.changed]
    return sum(any(bits) for bits in zip(*marks, strict=True))


def _glance(tensor: torch.Tensor) -> bytes:
    """A digest of some elements, always the same ones."""
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
