"""Syncs from a trainer to a rollout, and their futures, which behave like futures of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

import phalanx as px
from phalanx.testing import faults
from tests.weights.weight_workers import NAME, Actor, Fussy, Rollout, linked, same

SLOW_ON_RAY = True
Both = tuple[px.WorkerGroup, px.WorkerGroup]


class Slow(Fussy):
    """Waits in a load while it is held."""

    holds = False

    def loaded(self) -> None:
        super().loaded()
        while self.holds:
            time.sleep(0.02)

    @px.register(needs_weights=False)
    def hold(self, holds: bool) -> None:
        self.holds = holds


@pytest.fixture(scope="module")
def both(pool: px.ResourcePool) -> Both:
    return px.WorkerGroup(pool[0:1], Actor), px.WorkerGroup(pool[1:3], Slow)


@pytest.fixture
def sync(both: Both) -> Iterator[px.WeightSync]:
    with px.WeightSync(*both, NAME) as made:
        yield made


def test_a_sync_sends_the_trained_weights_to_every_rank(sync: px.WeightSync, both: Both) -> None:
    actor, rollout = both
    for _ in range(2):
        actor.train()
        version = sync()

        assert version.changed == 4
        assert str(version).startswith(f"version {version.number}: 824 B in ")
        assert str(version).endswith("4 tensors changed")
        assert all(same(one, actor.values()[0]) for one in rollout.values())
        assert rollout.version() == [version.number] * 2
        assert {*map(str, px.weights.status(rollout, NAME).values())} == {f"complete({version.number})"}


def test_a_sync_explains_its_transfers_in_advance_and_cannot_be_used_after_close(
    sync: px.WeightSync, backend: str
) -> None:
    text = str(sync.explain())

    hop, mover = ("same process", "copy") if backend == "inline" else ("same node", "shared memory")
    assert f"by locality: {hop} 824 B" in text
    assert text.count(mover) == 2
    sync.close()
    for use in (sync.explain, sync):
        with pytest.raises(px.DeclarationError, match="was closed"):
            use()


def test_an_error_in_the_source_is_raised_and_the_next_sync_works(sync: px.WeightSync, both: Both) -> None:
    both[0].run(lambda actor: setattr(actor, "steps", "three"))
    with pytest.raises(ValueError, match="three"):
        sync()

    both[0].run(lambda actor: setattr(actor, "steps", 3))
    assert sync().step == 3


def test_calls_around_a_sync_have_the_version_of_their_turn(sync: px.WeightSync, both: Both) -> None:
    actor, rollout = both
    number = sync().number
    before = rollout.version.submit()
    actor.train.submit()
    version = sync.submit()
    after = rollout.version.submit()

    assert [before.result(), after.result()] == [[number] * 2, [number + 1] * 2]
    assert version.result().number == number + 1


def test_a_future_returns_the_same_version_each_time_and_can_be_gathered_with_calls(
    sync: px.WeightSync, both: Both
) -> None:
    future = sync.submit()
    version, values = px.gather(future, both[0].values.submit())

    assert future.result(60) is future.result() is version
    assert future.done() and not future.cancelled()
    assert future.exception() is None
    assert len(values[0]) == 4


def test_a_future_can_be_awaited_but_not_passed_to_a_call(sync: px.WeightSync, both: Both) -> None:
    def number_of(_: Actor, version: px.weights.WeightsVersion) -> int:
        return version.number

    async def driver() -> tuple[int, int]:
        first = await sync.submit()
        future = sync.submit()
        return first.number, (await future).number

    first, second = asyncio.run(driver())
    both[0].train()
    future = sync.submit()

    assert second == first + 1
    with pytest.raises(px.DeclarationError, match=r"pass its result\(\)"):
        both[0].run(number_of, future)
    assert both[0].run(number_of, future.result()) == [second + 1]


def test_a_failed_future_raises_each_time_it_is_read_or_awaited(sync: px.WeightSync, both: Both) -> None:
    both[1].refuse(True)
    future = sync.submit()

    async def driver() -> None:
        await future

    for ask in (future.result, future.result, lambda: asyncio.run(driver())):
        with pytest.raises(ValueError, match="no room"):
            ask()
    assert isinstance(future.exception(), ValueError)
    both[1].refuse(False)
    assert sync().number > 1
    assert same(both[1].values()[0], both[0].values()[0])


def test_a_timeout_leaves_the_sync_running_and_a_sync_after_a_cancel_repairs_torn_weights(
    sync: px.WeightSync, both: Both, backend: str
) -> None:
    if backend != "ray":
        pytest.skip("a sync in this process is over when it was submitted")
    both[1].hold(True)
    future = sync.submit()
    for wait, seconds in ((future.result, 0.5), (future.exception, 0.1), (future.result, -0.1)):
        with pytest.raises(px.CallTimeout):
            wait(seconds)
        assert not future.done()

    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(px.CallCancelled):
        future.result()
    assert px.weights.status(both[1], NAME)[0].status == "torn"
    with pytest.raises(px.weights.WeightsTorn):
        both[1].values()
    both[1].hold(False)
    sync()
    assert same(both[1].values()[0], both[0].values()[0])


def test_the_future_of_a_target_that_is_restarted_has_an_error_of_a_lost_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors, real = list[BaseException | None](), Rollout.__init__

    def restarted(self: Rollout) -> None:
        real(self)
        errors.append(future.exception())

    with linked(Actor, Rollout) as (_, target, sync):
        sync()
        faults.kill(target, 0)
        future = sync.submit()
        monkeypatch.setattr(Rollout, "__init__", restarted)
        target.restart()

    (error,) = errors
    assert isinstance(error, px.PhalanxError)
    assert error.lost
