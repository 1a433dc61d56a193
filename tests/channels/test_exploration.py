"""All states that small loops can reach, and from each of them a way on: nothing deadlocks, whoever goes first."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator

import pytest

from phalanx.channels.staleness_messages import Accept, Advance, Begin, End
from phalanx.channels.staleness_state import StalenessStateMachine
from tests.channels.channel_model import Actors


def fingerprint(machine: StalenessStateMachine) -> Hashable:
    """All that decides what the machine does next, relative to the version in training."""
    ready = tuple((each.rows, machine.version - each.version) for each in machine.state().ready)
    leases = sorted((lease.rows, machine.version - lease.version) for lease in machine.leases)
    return ready, tuple(leases), tuple(begin.rows for begin in machine.waiting)


def successors(
    machine: StalenessStateMachine, sizes: tuple[int, ...], producers: int
) -> Iterator[StalenessStateMachine]:
    """What two producers, each with one lease at a time, and a trainer can do next."""
    if len(machine.waiting) + len(machine.leases) < producers:
        for rows in sizes:
            yield after(machine, lambda m, rows=rows: m.handle(Begin(object(), rows), 0.0))
    for lease in machine.leases:
        for version in range(lease.version, machine.version + 1):
            accept = Accept(lease.number, lease.rows, version)
            yield after(machine, lambda m, accept=accept: m.handle(accept, 0.0))
        yield after(machine, lambda m, lease=lease: m.handle(End(lease.number), 0.0))
    if machine.rows.ready >= machine.rows_per_version:
        yield after(machine, lambda m: m.handle(Advance(m.version + 1), 0.0))


def after(
    machine: StalenessStateMachine, act: Callable[[StalenessStateMachine], object]
) -> StalenessStateMachine:
    successor = copy.deepcopy(machine)
    act(successor)
    return successor


def reachable(
    start: StalenessStateMachine, sizes: tuple[int, ...], producers: int = 2
) -> list[StalenessStateMachine]:
    seen = {fingerprint(start): start}
    frontier = [start]
    while frontier:
        for successor in successors(frontier.pop(), sizes, producers):
            key = fingerprint(successor)
            # A lease may run for ever beside the others: so old it need not be told from older.
            too_old = any(lease.version + start.max_lag + 2 < successor.version for lease in successor.leases)
            if key not in seen and not too_old:
                seen[key] = successor
                frontier.append(successor)
    return list(seen.values())


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("per_version", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (2,)), (3, (1, 3))])
def test_from_every_state_of_the_loop_the_trainer_reaches_the_next_versions(
    max_lag: int, depth: int, per_version: int, sizes: tuple[int, ...]
) -> None:
    states = reachable(StalenessStateMachine(max_lag, per_version, depth), sizes)

    assert len(states) > 3
    assert all(trains_on(state, sizes) for state in states)


def trains_on(machine: StalenessStateMachine, sizes: tuple[int, ...]) -> bool:
    """Whether two more versions are trained when producers only ever generate, and the trainer waits for rows."""
    goal = machine.version + 2
    for _ in range(60):
        if machine.version >= goal:
            return True
        for lease in machine.leases:
            machine.handle(Accept(lease.number, lease.rows, machine.serving), 0.0)
        if machine.rows.ready >= machine.rows_per_version:
            machine.handle(Advance(machine.version + 1), 0.0)
        if not machine.waiting and not machine.leases:
            machine.handle(Begin(object(), sizes[0]), 0.0)
    return False


CHANNEL_STEPS: tuple[Callable[[Actors], object], ...] = (
    lambda actors: actors.put(0, 2, 1, None),
    lambda actors: actors.put(1, 5, 3, None),
    lambda actors: actors.take(0, 2, by_rows=False, patience=None),
    lambda actors: actors.take(1, 3, by_rows=True, patience=None),
    lambda actors: actors.acknowledge(0),
    lambda actors: actors.give_back(0, unreadable=False),
    lambda actors: actors.kill(1),
    lambda actors: actors.finish(),
)


@pytest.mark.parametrize("maxsize", [1, 2])
def test_in_every_order_of_four_steps_a_channel_keeps_its_account_and_nobody_stands_still(
    maxsize: int,
) -> None:
    for steps in itertools.product(CHANNEL_STEPS, repeat=4):
        actors = Actors(maxsize, "items")

        for step in steps:
            step(actors)  # each checks the account, and that nobody waits who need not
