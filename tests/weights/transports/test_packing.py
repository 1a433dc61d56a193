"""Buckets that hold what changed: between two ends in one process, over the ring and over a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.planning.buckets import buckets_from, buckets_to
from phalanx.weights.planning.readers.plain import read_tensors
from phalanx.weights.planning.resharding_planner import make_plan
from phalanx.weights.planning.tensors import read_slot, write_slot
from phalanx.weights.transports.bucket_packing import DeltaPacking
from phalanx.weights.transports.ring import RingSource, RingTarget
from phalanx.weights.transports.store_transport import StoreSource, StoreTarget
from phalanx.weights.transports.transport_interface import WeightReceiver, WeightSender
from tests.weights.transports.test_within_a_process import Dictionary

BUCKET_BYTES = 1 << 16


class Link:
    """A source of fp32 and a target of bfloat16, one tensor of which lies the other way round in memory."""

    def __init__(self, kind: str) -> None:
        self.source = {"a": torch.randn(300, 512), "b": torch.randn(700), "one": torch.randn(())}
        self.target = {name: torch.zeros_like(one).bfloat16() for name, one in self.source.items()}
        self.target["a"] = torch.zeros(512, 300).bfloat16().T
        plan = make_plan([read_tensors(self.source).manifest], [read_tensors(self.target).manifest])
        self.sent = buckets_from(plan, 0, BUCKET_BYTES)
        self.taken = buckets_to(plan, 0, BUCKET_BYTES)
        self.packings = DeltaPacking(), DeltaPacking()
        self.kind = kind
        self.ends = self._ends(kind)

    def _ends(self, kind: str) -> tuple[WeightSender, WeightReceiver]:
        packed, unpacked = self.packings
        if kind == "store":
            shelf = Dictionary()
            return StoreSource(shelf, packed), StoreTarget(shelf, 0, unpacked)
        ring = RingSource(0, max(map(packed.room, self.sent)), packing=packed)
        return ring, RingTarget(0, {0: ring.address}, packing=unpacked)

    def sync(self, number: int, known: int | None, has: int | None) -> int:
        """Bytes that were sent."""
        sent: list[int | Exception] = []
        for packing, version in zip(self.packings, (known, has), strict=True):
            packing.begin(version)
        sending = threading.Thread(target=lambda: sent.append(self._send()))
        sending.start()
        if self.kind == "store":  # whose buckets of the version before are there still
            sending.join()
        try:
            self.ends[1].receive(self.taken, lambda slot: write_slot(self.target, slot), timeout=20.0)
        finally:
            sending.join()
        for packing in self.packings:
            packing.end(number)
        assert isinstance(sent[0], int)
        return sent[0]

    def _send(self) -> int | Exception:
        try:
            return self.ends[0].send(self.sent, lambda slot: read_slot(self.source, slot), timeout=20.0)
        except WeightsTransferError as error:
            return error

    def change(self, share: float) -> None:
        for one in self.source.values():
            one[torch.rand(one.shape) < share] += 1.0

    @property
    def same(self) -> bool:
        return all(torch.equal(self.target[name], one.bfloat16()) for name, one in self.source.items())

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture(params=["ring", "store"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    torch.manual_seed(0)
    made = Link(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_what_changed_leads_to_the_same_bits(link: Link, share: float) -> None:
    link.sync(1, None, None)
    link.change(share)
    link.sync(2, 1, 1)

    assert link.same


def test_a_hundredth_of_bfloat16_costs_at_most_a_thirtieth(link: Link) -> None:
    everything = link.sync(1, None, None)
    link.change(0.01)

    assert link.sync(2, 1, 1) <= 0.035 * sum(bucket.nbytes for bucket in link.sent) < everything


def test_the_base_is_one_copy_in_the_targets_type(link: Link) -> None:
    link.sync(1, None, None)
    link.change(0.5)
    link.sync(2, 1, 1)

    assert link.packings[0].base.nbytes == sum(one.numel() * 2 for one in link.source.values())


@pytest.mark.parametrize("known", [None, 7])
def test_everything_goes_where_the_base_is_not_what_all_targets_have(link: Link, known: int | None) -> None:
    everything = link.sync(1, None, None)

    assert link.sync(2, known, None) == everything


def test_a_source_that_broke_off_sends_everything_the_next_time(link: Link) -> None:
    everything = link.sync(1, None, None)
    link.packings[0].begin(1)
    link.packings[0].pack(torch.empty(1 << 18, dtype=torch.uint8), link.sent[0], _changed(link))

    assert link.sync(3, 1, 1) == everything
    assert link.same


def test_a_target_of_another_version_takes_nothing(link: Link) -> None:
    link.sync(1, None, None)
    before = {name: one.clone() for name, one in link.target.items()}
    link.change(1.0)
    with pytest.raises(WeightsTransferError, match="since version 1 came to a rank that has version None"):
        link.sync(2, 1, None)

    assert all(torch.equal(one, before[name]) for name, one in link.target.items())


def _changed(link: Link) -> Callable[..., torch.Tensor]:
    return lambda slot: read_slot(link.source, slot) + 1.0
