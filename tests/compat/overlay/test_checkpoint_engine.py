"""verl's checkpoint engine on the movers: what is sent arrives, whatever its shapes; who is left hears of an end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.compat.verl_weights import engine as engines
from phalanx.compat.verl_weights.engine import WeightsEngine
from phalanx.compat.verl_weights.routes import Metadata, Reading, routes
from phalanx.compat.verl_weights.shelf import Board
from phalanx.compat.verl_weights.windows import Gathering, Joining, read_table
from phalanx.errors import DeclarationError, WeightsLost
from tests.compat.overlay.stand_in import make_verl
from tests.compat.overlay.test_reach import INSTALL, run

Named = list[tuple[str, torch.Tensor]]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
REGISTRY = '''
from abc import ABC, abstractmethod

class CheckpointEngineRegistry:
    registered = {}

    def register(backend):
        return lambda cls: CheckpointEngineRegistry.registered.setdefault(backend, cls)

class CheckpointEngine(ABC):
    """verl's own."""

    @abstractmethod
    def prepare(self): ...
    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata): ...
    @abstractmethod
    def init_process_group(self, **kwargs): ...
    @abstractmethod
    def finalize(self): ...
    @abstractmethod
    async def send_weights(self, weights, global_steps=None): ...
    @abstractmethod
    async def receive_weights(self, global_steps=None): ...
'''


def model(*shapes: tuple[int, ...]) -> Named:
    return [
        (f"layer.{number}", torch.randn(shape).to(DTYPES[number % len(DTYPES)]))
        for number, shape in enumerate(shapes)
    ]


def same(found: Named, wanted: Named) -> bool:
    return len(found) == len(wanted) and all(
        one == other and first.dtype == second.dtype and torch.equal(first, second)
        for (one, first), (other, second) in zip(found, wanted, strict=True)
    )


class Update:
    """Engines of both sides in one process, through one update as verl's manager does it."""

    def __init__(self, senders: int, readers: int, bucket: int = 4096, **options: Any) -> None:
        self.actor = [WeightsEngine(bucket, is_master=rank == 0, **options) for rank in range(senders)]
        self.rollout = [WeightsEngine(bucket, **options) for _ in range(readers)]

    def begin(self) -> None:
        every = [*self.actor, *self.rollout]
        said = [engine.prepare() for engine in every]
        for engine, route in zip(every, self.routes(said), strict=True):
            engine.init_process_group(route)

    def routes(self, said: list[Metadata]) -> list[Any]:
        actor, rollout = WeightsEngine.build_topology(len(self.actor), len(self.rollout), said)
        return [*actor["route"], *rollout["route"]]

    def end(self) -> None:
        for engine in [*self.actor, *self.rollout]:
            engine.finalize()

    async def move(self, weights: Named, sent: int = 1, wanted: int = 1) -> list[Any]:
        """What each rank's call gives, or raises."""
        sends = [engine.send_weights(iter(weights), global_steps=sent) for engine in self.actor]
        reads = [received(engine, wanted) for engine in self.rollout]
        return await asyncio.gather(*sends, *reads, return_exceptions=True)


async def received(engine: WeightsEngine, step: int | None = None) -> Named:
    return [pair async for pair in engine.receive_weights(global_steps=step)]


def updated(update: Update, weights: Named, **steps: int) -> list[Any]:
    update.begin()
    try:
        return asyncio.run(update.move(weights, **steps))
    finally:
        update.end()


SHAPES = [(3, 5), (40, 50), (), (0, 4), (9000,), (7,)]


def test_every_rank_of_the_rollout_has_all_weights_in_update_after_update() -> None:
    update = Update(senders=2, readers=3, timeout=20.0)

    for _ in range(2):
        weights = model(*SHAPES)
        told, idle, *found = updated(update, weights)

        assert told["sync/tensors"] == len(SHAPES)
        assert idle == {}
        assert all(same(one, weights) for one in found)


def test_received_tensors_may_be_kept_and_written() -> None:
    update, weights = Update(1, 2, timeout=20.0), model((30, 30), (30, 30))

    _, first, second = updated(update, weights)
    first[0][1].zero_()

    assert same(second, weights)
    assert weights[0][1].any()


def test_weights_travel_as_the_type_that_the_rollout_wants() -> None:
    update = Update(1, 1, timeout=20.0, rollout_dtype="bfloat16")

    _, found = updated(update, [("a", torch.ones(4)), ("b", torch.arange(4))])

    assert [tensor.dtype for _, tensor in found] == [torch.bfloat16, torch.int64]


def test_weights_of_another_step_are_refused_and_the_sender_hears_of_it() -> None:
    sender, reader = updated(Update(1, 1, timeout=20.0), model(*SHAPES), sent=1, wanted=2)

    assert isinstance(reader, WeightsLost)
    assert "step 1" in str(reader) and "step 2" in str(reader)
    assert isinstance(sender, WeightsLost)
    assert "target rank 0" in str(sender)


def failing() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(3000)
    raise ValueError("cannot be gathered")


def test_a_sender_that_fails_is_heard_by_its_readers_at_once() -> None:
    sender, reader = updated(Update(1, 1, timeout=600.0), failing())  # type: ignore[arg-type]

    assert isinstance(sender, ValueError)
    assert isinstance(reader, WeightsLost)
    assert "source rank 0" in str(reader)


def test_an_update_after_one_that_failed_brings_everything() -> None:
    update, weights = Update(1, 1, timeout=20.0), model(*SHAPES)
    updated(update, failing())  # type: ignore[arg-type]

    _, found = updated(update, weights)

    assert same(found, weights)


def test_a_reader_that_nobody_serves_ends_in_time() -> None:
    update = Update(1, 1, timeout=0.2)
    update.begin()

    with pytest.raises(WeightsLost, match="source rank 0 did not come within"):
        asyncio.run(received(update.rollout[0]))
    update.end()


def test_a_bucket_that_holds_nothing_is_refused_with_its_setting() -> None:
    with pytest.raises(DeclarationError, match="update_weights_bucket_megabytes"):
        WeightsEngine(bucket_size=0)


def test_a_rank_of_the_actor_that_is_to_receive_is_told_which_backend_it_needs() -> None:
    engine = WeightsEngine(4096, is_master=True)

    with pytest.raises(DeclarationError, match="backend=naive"):
        engine.init_process_group(Reading(0, 0))


def test_each_node_is_served_by_its_first_rank_of_the_actor_and_others_by_the_store() -> None:
    actor = [Metadata(place=node, address=f"at {rank}") for rank, node in enumerate("aabb")]
    rollout = [Metadata(place=node, address="") for node in "bcac"]

    serving, reading = routes(actor, rollout)

    assert [(one.near, one.far) for one in serving] == [((2,), (1, 3)), ((), ()), ((0,), ()), ((), ())]
    assert [(one.source, one.address) for one in reading] == [(2, "at 2"), (0, ""), (0, "at 0"), (0, "")]
    assert {one.board for one in reading if not one.address} == {serving[0].board}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12), st.integers(64, 9000))
def test_windows_are_never_too_large_and_joined_give_the_tensors(
    shapes: list[tuple[int, ...]], limit: int
) -> None:
    weights, gathering, joining = model(*shapes), Gathering(limit), Joining()
    windows = [window for pair in weights for window in gathering.add(*pair)]
    found: Named = []

    for window in [*windows, gathering.finish()]:
        assert window.nbytes <= limit
        memory = torch.zeros(window.nbytes, dtype=torch.uint8)
        engines.Whole().pack(memory, window.bucket(0, (0,)), window.read)
        found += joining.tensors(read_table(window.table())[0], memory)

    joining.finish()
    assert same(found, weights)


async def _board() -> list[Any]:
    board = Board((0, 1))
    await board.put(0, "first")
    await board.put(1, "second")
    waiting = asyncio.create_task(board.put(2, "third"))
    await board.taken(0, 0)
    await asyncio.wait([waiting], timeout=0.0)
    before = waiting.done()
    await board.taken(0, 1)
    await waiting
    return [before, await board.get(2)]


def test_the_store_holds_two_buckets_until_all_readers_have_the_older_one() -> None:
    assert asyncio.run(_board()) == [False, "third"]


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    made = make_verl(tmp_path)
    package = made / "verl" / "checkpoint_engine"
    package.mkdir()
    (package / "__init__.py").write_text("from .base import CheckpointEngineRegistry")
    (package / "base.py").write_text(REGISTRY)
    return made


FOUND = (
    "import verl.checkpoint_engine.base as base\n"
    "engine = base.CheckpointEngineRegistry.registered.get('phalanx')\n"
    "print(engine and issubclass(engine, base.CheckpointEngine) and engine(bucket_size=4096).wire_format)"
)


def test_the_overlay_puts_the_engine_into_verls_registry_when_that_is_imported(verl: Path) -> None:
    assert run(INSTALL + FOUND, verl).strip() == "named_tensors"


def test_without_the_overlay_verl_has_the_engine_by_its_own_setting_alone(verl: Path) -> None:
    assert run(FOUND, verl).strip() == "None"
    assert run("import phalanx.compat.verl_weights.registration\n" + FOUND, verl).strip() == "named_tensors"
