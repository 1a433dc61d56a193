"""Movers that need no second process to be tried: roles of one process, and an object store."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from phalanx.errors import DeclarationError, WeightsTransferError
from phalanx.weights.planning.buckets import Slot, buckets_from, buckets_to
from phalanx.weights.planning.readers.plain import read_tensors
from phalanx.weights.planning.resharding_plan import Plan
from phalanx.weights.planning.resharding_planner import make_plan
from phalanx.weights.planning.tensors import read_slot, write_slot
from phalanx.weights.transports.ipc import DeviceSegments
from phalanx.weights.transports.local import LocalSource, LocalTarget, Meeting, share
from phalanx.weights.transports.ring import RingSource, RingTarget
from phalanx.weights.transports.store_transport import StoreSource, StoreTarget
from phalanx.weights.transports.transport_interface import WeightReceiver, WeightSender
from tests.weights.planning.layouts import Layout, blank, locals_of, manifests, model

TWO, ONE = Layout((1, 1, 2, 1, 1)), Layout((1, 1, 1, 1, 1))
BUCKET_BYTES = 4096


class Dictionary:
    """A shelf in this process."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], torch.Tensor] = {}
        self._notes: dict[tuple[int, int], bytes] = {}
        self._changed = threading.Condition()

    def put(self, source: int, number: int, memory: torch.Tensor) -> None:
        with self._changed:
            self._held[source, number] = memory
            self._changed.notify_all()

    def get(self, source: int, number: int, timeout: float) -> torch.Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: (source, number) in self._held, timeout):
                raise WeightsTransferError(f"bucket {number} of source rank {source} was not stored in time")
            return self._held[source, number]

    def tell(self, source: int, target: int, note: bytes) -> None:
        with self._changed:
            self._notes[source, target] = note
            self._changed.notify_all()

    def told(self, source: int, target: int, timeout: float) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: (source, target) in self._notes, timeout)
            return self._notes[source, target]


Ends = tuple[list[WeightSender], list[WeightReceiver]]


def local(sources: int, targets: int) -> Ends:
    """Roles of one process are one source and one target."""
    meeting = Meeting()
    return [LocalSource({0: meeting})], [LocalTarget({0: meeting})]


def stored(sources: int, targets: int) -> Ends:
    shelf = Dictionary()
    return [StoreSource(shelf) for _ in range(sources)], [StoreTarget(shelf, rank) for rank in range(targets)]


def ring(sources: int, targets: int) -> Ends:
    rings = [RingSource(rank, BUCKET_BYTES) for rank in range(sources)]
    addresses = {rank: one.address for rank, one in enumerate(rings)}
    return list(rings), [RingTarget(rank, addresses) for rank in range(targets)]


def device_ring(sources: int, targets: int) -> Ends:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kind = DeviceSegments()
    rings = [RingSource(rank, BUCKET_BYTES, kind=kind) for rank in range(sources)]
    addresses = {rank: one.address for rank, one in enumerate(rings)}
    return list(rings), [RingTarget(rank, addresses, kind=kind) for rank in range(targets)]


MOVERS = {"local": local, "store": stored, "ring": ring, "CUDA IPC": device_ring}


def sync(
    plan: Plan,
    ends: Ends,
    sources: Sequence[Mapping[str, torch.Tensor]],
    targets: Sequence[Mapping[str, torch.Tensor]],
    by_readers: bool = False,
) -> None:
    """One sync with a thread per rank; what a rank raises is raised."""
    work: list[Callable[[], object]] = []
    for rank, end in enumerate(ends[0]):
        work.append(
            lambda rank=rank, end=end: end.send(
                buckets_from(plan, rank, BUCKET_BYTES, by_readers=by_readers),
                lambda slot: read_slot(sources[rank], slot),
                timeout=20.0,
            )
        )
    for rank, end in enumerate(ends[1]):
        work.append(
            lambda rank=rank, end=end: end.receive(
                buckets_to(plan, rank, BUCKET_BYTES, by_readers=by_readers),
                lambda slot: write_slot(targets[rank], slot),
                timeout=20.0,
            )
        )
    at_once(*work)


def at_once(*work: Callable[[], object]) -> None:
    """Each in a thread of its own; what one raises is raised."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def close(ends: Ends) -> None:
    for end in (*ends[0], *ends[1]):
        end.close()


@pytest.mark.parametrize("by_readers", [False, True])
@pytest.mark.parametrize("mover", MOVERS)
def test_weights_arrive_bit_for_bit(mover: str, by_readers: bool) -> None:
    layout = ONE if mover == "local" else TWO
    target = ONE if mover == "local" else Layout((1, 2, 1, 1, 2), tp_dim=1)
    named = model([[24, 50], [4, 6], []])
    plan = make_plan(manifests(layout, named), manifests(target, named))
    wanted = locals_of(target, named)
    arrived = blank(wanted)
    ends = MOVERS[mover](layout.ranks, target.ranks)

    sync(plan, ends, locals_of(layout, named), arrived, by_readers)
    close(ends)

    assert all(
        torch.equal(got[name], one[name]) for got, one in zip(arrived, wanted, strict=True) for name in one
    )


@pytest.mark.parametrize("mover", MOVERS)
def test_the_source_casts(mover: str) -> None:
    masters = {"layers.0.w": torch.linspace(0, 1, 3000)}
    named = {name: one.bfloat16() for name, one in masters.items()}
    plan = make_plan(manifests(ONE, masters), manifests(ONE, named))
    arrived = blank(locals_of(ONE, named))
    ends = MOVERS[mover](1, 1)

    sync(plan, ends, locals_of(ONE, masters), arrived)
    close(ends)

    assert torch.equal(arrived[0]["layers.0.w"], named["layers.0.w"])


@pytest.mark.parametrize("size", [0, 8, 1 << 20])
@pytest.mark.parametrize("mover", MOVERS)
def test_each_reader_gets_its_own_note_of_any_size(mover: str, size: int) -> None:
    layout = ONE if mover == "local" else TWO
    named = model([[8, 4]])
    plan = make_plan(manifests(ONE, named), manifests(layout, named))
    ends = MOVERS[mover](1, layout.ranks)
    arrived = blank(locals_of(layout, named))
    heard: dict[int, dict[int, bytes]] = {}

    def send() -> None:
        ends[0][0].send(
            buckets_from(plan, 0, BUCKET_BYTES),
            lambda slot: read_slot(locals_of(ONE, named)[0], slot),
            timeout=20.0,
            note=lambda target: bytes([target]) * size,
        )

    def receive(rank: int) -> None:
        buckets = buckets_to(plan, rank, BUCKET_BYTES)
        heard[rank] = (
            ends[1][rank].receive(buckets, lambda slot: write_slot(arrived[rank], slot), timeout=20.0).notes
        )

    at_once(send, *(functools.partial(receive, rank) for rank in range(layout.ranks)))
    close(ends)

    assert heard == {rank: {0: bytes([rank]) * size} for rank in range(layout.ranks)}


@pytest.mark.parametrize("mover", MOVERS)
def test_a_rank_that_has_nothing_to_move_is_done_at_once(mover: str) -> None:
    ends = MOVERS[mover](1, 1)

    assert ends[0][0].send((), lambda slot: torch.empty(0), timeout=1.0) == 0
    assert ends[1][0].receive({}, lambda slot: torch.empty(0), timeout=1.0).nbytes == 0
    close(ends)


@pytest.mark.parametrize("mover", MOVERS)
def test_ends_can_be_closed_again(mover: str) -> None:
    ends = MOVERS[mover](1, 1)

    close(ends)
    close(ends)


@pytest.mark.parametrize("mover", MOVERS)
def test_a_source_that_does_not_come_is_an_error_when_the_time_is_over(mover: str) -> None:
    named = model([[4]])
    plan = make_plan(manifests(ONE, named), manifests(ONE, named))
    ends = MOVERS[mover](1, 1)

    with pytest.raises(WeightsTransferError, match="source rank 0"):
        ends[1][0].receive(buckets_to(plan, 0, BUCKET_BYTES), lambda slot: torch.empty(0), timeout=0.05)
    close(ends)


@pytest.mark.parametrize("mover", ["local", "ring"])
def test_a_source_that_gives_up_is_known_to_a_target_that_waits_for_it(mover: str) -> None:
    named = model([[4]])
    plan = make_plan(manifests(ONE, named), manifests(ONE, named))
    (source,), (target,) = MOVERS[mover](1, 1)
    due = buckets_to(plan, 0, BUCKET_BYTES)
    giving_up = threading.Timer(0.05, source.close)
    giving_up.start()

    with pytest.raises(WeightsTransferError, match="ended"):
        target.receive(due, lambda slot: torch.empty(0), timeout=10.0)
    giving_up.join()
    target.close()


def test_a_target_that_gives_up_is_known_to_a_source_role_that_waits_for_it() -> None:
    (source,), (target,) = local(1, 1)
    named = model([[4]])
    plan = make_plan(manifests(ONE, named), manifests(ONE, named))
    target.close()

    with pytest.raises(WeightsTransferError, match="target rank 0, a role of this process, has ended"):
        source.send(buckets_from(plan, 0, BUCKET_BYTES), lambda slot: torch.empty(0), timeout=10.0)


def test_one_thread_can_be_source_and_then_target() -> None:
    named = model([[4]])
    plan = make_plan(manifests(ONE, named), manifests(ONE, named))
    held, arrived = locals_of(ONE, named)[0], blank(locals_of(ONE, named))[0]
    meeting = Meeting()

    LocalSource({0: meeting}, wait=False).send(
        buckets_from(plan, 0, BUCKET_BYTES), lambda slot: read_slot(held, slot), timeout=1.0
    )
    LocalTarget({0: meeting}).receive(
        buckets_to(plan, 0, BUCKET_BYTES), lambda slot: write_slot(arrived, slot), timeout=1.0
    )

    assert torch.equal(arrived["layers.3.w0"], named["layers.3.w0"])


def test_a_bucket_for_some_readers_has_nothing_for_others() -> None:
    named = model([[8, 4]])
    plan = make_plan(manifests(ONE, named), manifests(TWO, named))

    buckets = buckets_from(plan, 0, BUCKET_BYTES, by_readers=True)

    assert [bucket.readers for bucket in buckets] == [(0,), (1,)]
    assert all(slot.targets == bucket.readers for bucket in buckets for slot in bucket.slots)


def is_there(address: str) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as trial:
        return trial.connect_ex(b"\0" + address.encode()) == 0


def test_a_ring_that_is_closed_cannot_be_reached() -> None:
    source = RingSource(0, BUCKET_BYTES)
    assert is_there(source.address)
    source.close()

    assert not is_there(source.address)


def test_a_target_that_sees_no_source_says_that_it_may_be_in_another_container() -> None:
    named = model([[4]])
    plan = make_plan(manifests(ONE, named), manifests(ONE, named))

    with pytest.raises(WeightsTransferError, match="another container"):
        RingTarget(0, {0: "nobody"}).receive(
            buckets_to(plan, 0, BUCKET_BYTES), lambda slot: slot, timeout=1.0
        )  # type: ignore[arg-type, return-value]


def test_a_segment_is_not_filled_again_before_it_was_read() -> None:
    named = {f"layers.0.w{index}": torch.full((1024,), float(index)) for index in range(5)}
    plan = make_plan(manifests(ONE, named), manifests(ONE, named))
    held, arrived = locals_of(ONE, named)[0], blank(locals_of(ONE, named))[0]
    third, overtaken = threading.Event(), list[bool]()
    names = list[str]()
    source = RingSource(0, BUCKET_BYTES, segments=2)
    target = RingTarget(0, {0: source.address})

    def read(slot: Slot) -> torch.Tensor:
        names.append(slot.source_name)
        if len(names) == 3:
            third.set()
        return read_slot(held, slot)

    def write(slot: Slot) -> torch.Tensor:
        overtaken.append(not overtaken and third.wait(0.2))
        return write_slot(arrived, slot)

    work = (buckets_from(plan, 0, BUCKET_BYTES), read)
    sending = threading.Thread(target=lambda: source.send(*work, timeout=20.0))
    sending.start()
    target.receive(buckets_to(plan, 0, BUCKET_BYTES), write, timeout=20.0)
    sending.join()
    close(([source], [target]))

    assert len(names) == 5 and not any(overtaken)


def test_a_ring_costs_no_memory_before_it_is_used() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    source = RingSource(0, 1 << 30)
    grown = resident() - before
    source.close()

    assert grown < 1 << 26


def test_shared_weights_are_the_sources_memory() -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    readings = read_tensors(source), read_tensors(target)

    share(readings[0].tensors, dict(target.named_parameters()), (readings[0].manifest, readings[1].manifest))
    with torch.no_grad():
        source.weight.fill_(7)

    assert target.weight.eq(7).all() and target.bias.data_ptr() == source.bias.data_ptr()


def test_weights_of_another_type_cannot_be_shared() -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).bfloat16()
    readings = read_tensors(source), read_tensors(target)

    with pytest.raises(DeclarationError, match="without share=True, which copies"):
        share(
            readings[0].tensors, dict(target.named_parameters()), (readings[0].manifest, readings[1].manifest)
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeclarationError, match="use host segments"):
        DeviceSegments()
