"""Bounded staleness, case by case; schedules of many are in test_staleness_schedules."""

from __future__ import annotations

import pickle

import pytest

from phalanx.channels.staleness_messages import (
    Accept,
    Accepted,
    Advance,
    Begin,
    Begun,
    Cancel,
    Discard,
    Drop,
    Dropped,
    End,
    Evicted,
    Expired,
    Overdue,
    Refused,
    Serve,
    Tick,
    Withdrawn,
)
from phalanx.channels.staleness_state import StalenessStateMachine
from phalanx.errors import DeclarationError, InternalError


def begun(machine: StalenessStateMachine, rows: int, ticket: object = None) -> int | None:
    """The lease, None if it has to wait."""
    done = machine.handle(Begin(ticket or object(), rows), 0.0)
    return next((each.lease for each in done if isinstance(each, Begun)), None)


def fill(machine: StalenessStateMachine, rows: int) -> list[int]:
    """Leases of `rows` rows until one has to wait; that one is withdrawn."""
    leases: list[int] = []
    while (lease := begun(machine, rows, "probe")) is not None:
        leases.append(lease)
    machine.handle(Cancel("probe"), 0.0)
    return leases


def ready(machine: StalenessStateMachine, rows: int) -> int:
    """A lease of `rows` rows, all accepted under the version they began with."""
    lease = begun(machine, rows)
    assert lease is not None
    assert machine.handle(Accept(lease, rows, machine.serving), 0.0)[0] == Accepted(lease, tuple(range(rows)))
    return lease


@pytest.mark.parametrize(("depth", "leases"), [(0, 2), (1, 4), (2, 6), (8, 8)])
def test_it_paces_by_depth_and_never_beyond_the_bound(depth: int, leases: int) -> None:
    assert len(fill(StalenessStateMachine(max_lag=3, rows_per_version=4, depth=depth), rows=2)) == leases


def test_without_lag_generation_and_training_take_turns() -> None:
    machine = StalenessStateMachine(max_lag=0, rows_per_version=4)
    ready(machine, 4)
    machine.handle(Begin("next", 4), 0.0)

    done = machine.handle(Advance(1), 0.0)

    assert [each.ticket for each in done if isinstance(each, Begun)] == ["next"]
    assert machine.lags == {0: 4}


def test_rows_that_are_dropped_give_their_credit_back() -> None:
    machine = StalenessStateMachine(max_lag=0, rows_per_version=4)
    lease = begun(machine, 4)
    machine.handle(Begin("next", 2), 0.0)

    done = machine.handle(Drop(lease or 0, 2, "filtered"), 0.0)

    assert done[0] == Dropped(0, 2, "filtered")
    assert isinstance(done[1], Begun)


def test_leaving_a_lease_drops_what_it_did_not_accept_with_the_reason() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    lease = begun(machine, 4) or 0
    machine.handle(Accept(lease, 1, 0), 0.0)

    assert machine.handle(End(lease, "ValueError: bad prompt"), 0.0) == [
        Dropped(lease, 3, "ValueError: bad prompt")
    ]
    assert (machine.rows.accepted, machine.rows.dropped, machine.rows.running) == (1, 3, 0)


def test_a_lease_that_accepted_all_may_be_ended_and_nothing_changes() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    lease = ready(machine, 4)

    assert machine.handle(End(lease), 0.0) == []
    assert machine.rows.dropped == 0


def test_rows_are_accepted_in_parts() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    lease = begun(machine, 4) or 0

    assert machine.handle(Accept(lease, 3, 0), 0.0) == [Accepted(lease, (0, 1, 2))]
    assert machine.handle(Accept(lease, 1, [0]), 0.0) == [Accepted(lease, (0,))]
    assert machine.leases == ()


def test_a_straggler_is_accepted_up_to_the_bound() -> None:
    machine = StalenessStateMachine(max_lag=2, rows_per_version=2)
    straggler = begun(machine, 1) or 0
    machine.handle(Advance(2), 0.0)

    assert machine.handle(Accept(straggler, 1, 0), 0.0) == [Accepted(straggler, (0,))]
    machine.handle(Advance(3), 0.0)
    assert machine.lags == {2: 1}


def test_rows_that_would_be_too_old_when_trained_on_are_refused_and_counted() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=2)
    straggler = begun(machine, 3) or 0
    machine.handle(Advance(1), 0.0)
    before = ready(machine, 1)

    done = machine.handle(Accept(straggler, 3, [0, 0, 1]), 0.0)

    # One row is ready: of version 0 one more fits into this version's training; version 1 may wait for the next.
    assert done == [
        Accepted(straggler, (0, 2)),
        Refused(straggler, (1,), "stale"),
        Dropped(straggler, 1, "stale"),
    ]
    assert [each.lease for each in machine.state().ready] == [before, straggler, straggler]


def test_the_link_is_told_once_of_leases_that_generate_in_vain() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=2)
    lease = begun(machine, 1) or 0

    assert machine.handle(Advance(1), 0.0) == []
    assert machine.handle(Advance(2), 0.0) == [Overdue(lease)]
    assert machine.handle(Advance(3), 0.0) == []


def test_rows_that_a_trainer_left_over_are_evicted_when_they_become_too_old() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=2)
    lease = ready(machine, 4)

    assert machine.handle(Advance(1, trained=1), 0.0) == [Evicted(lease, 3, 4), Dropped(lease, 1, "stale")]
    assert machine.handle(Advance(2), 0.0) == []
    assert machine.lags == {0: 1, 1: 2}


def test_rows_discarded_after_they_were_accepted_give_their_credit_back_and_others_move_up() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=2)
    lease = ready(machine, 4)

    done = machine.handle(Discard(lease, 1, 3, "all answers alike"), 0.0)

    assert done == [Dropped(lease, 2, "all answers alike")]
    assert [(each.start, each.stop) for each in machine.state().ready] == [(0, 1), (3, 4)]
    assert len(fill(machine, 1)) == 2


def test_versions_that_are_skipped_have_had_their_rows_each() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=2)
    ready(machine, 4)

    machine.handle(Advance(2), 0.0)

    assert machine.lags == {0: 2, 1: 2}


def test_nothing_begins_while_engines_generate_with_a_version_too_old() -> None:
    machine = StalenessStateMachine(max_lag=0, rows_per_version=2)
    machine.handle(Advance(1, serving=False), 0.0)
    machine.handle(Begin("t", 1), 0.0)

    assert machine.handle(Serve(1), 0.0) == [Begun("t", 0, version=1)]


def test_engines_that_lag_behind_use_up_some_of_the_bound() -> None:
    machine = StalenessStateMachine(max_lag=2, rows_per_version=2, depth=2)
    machine.handle(Advance(1, serving=False), 0.0)

    assert len(fill(machine, 1)) == 4


def test_rows_that_do_not_divide_a_version_do_not_stop_the_trainer() -> None:
    machine = StalenessStateMachine(max_lag=0, rows_per_version=5)
    ready(machine, 4)
    lease = begun(machine, 4) or 0

    assert machine.handle(Accept(lease, 4, 0), 0.0)[:2] == [
        Accepted(lease, (0,)),
        Refused(lease, (1, 2, 3), "stale"),
    ]


def test_a_lease_larger_than_the_pace_begins_when_nothing_can_fill_a_version() -> None:
    machine = StalenessStateMachine(max_lag=8, rows_per_version=2, depth=0)

    assert begun(machine, 10) is not None
    assert begun(machine, 1) is None


def test_requests_begin_in_order_of_arrival() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4, depth=1)
    lease = begun(machine, 6) or 0
    machine.handle(Begin("large", 4), 0.0)
    machine.handle(Begin("small", 1), 0.0)

    done = machine.handle(End(lease), 0.0)

    assert [each.ticket for each in done if isinstance(each, Begun)] == ["large", "small"]


def test_a_request_whose_deadline_passes_is_told_what_it_waited_for() -> None:
    machine = StalenessStateMachine(max_lag=0, rows_per_version=4)
    ready(machine, 4)
    machine.handle(Begin("t", 1, deadline=5.0), 0.0)

    assert machine.wake_at == 5.0
    (expired,) = machine.handle(Tick(), 5.0)

    assert isinstance(expired, Expired)
    assert expired.behind.startswith("4 rows are ready and 0 running, where 4 make a version")


def test_a_request_behind_another_is_told_so() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    begun(machine, 6)
    machine.handle(Begin("large", 4), 0.0)

    done = machine.handle(Begin("small", 1, deadline=0.0), 0.0)

    assert done == [Expired("small", "requests that came before it wait")]


def test_a_request_is_cancelled_once() -> None:
    machine = StalenessStateMachine(max_lag=0, rows_per_version=1)
    begun(machine, 1)
    machine.handle(Begin("t", 1), 0.0)

    assert machine.handle(Cancel("t"), 0.0) == [Withdrawn("t", waited=True)]
    assert machine.handle(Cancel("t"), 0.0) == [Withdrawn("t", waited=False)]


def test_after_a_restore_running_leases_are_dropped_and_ready_rows_still_count() -> None:
    machine = StalenessStateMachine(max_lag=2, rows_per_version=4, version=100)
    ready(machine, 4)
    old = begun(machine, 2) or 0

    loaded = StalenessStateMachine.load(pickle.loads(pickle.dumps(machine.state())))

    assert loaded.dropped == {"restored": 2}
    assert (loaded.rows.ready, loaded.rows.running, loaded.rows.submitted) == (4, 0, 6)
    assert loaded.handle(Accept(old, 2, 100), 0.0) == [Refused(old, (0, 1), "ended")]


@pytest.mark.parametrize("with_ready", [True, False])
def test_no_burst_follows_a_restore(with_ready: bool) -> None:
    machine = StalenessStateMachine(max_lag=8, rows_per_version=4, version=100)
    for version in range(101, 120):
        ready(machine, 4)
        machine.handle(Advance(version), 0.0)
    ready(machine, 4)

    loaded = StalenessStateMachine.load(machine.state(), with_ready=with_ready)

    assert loaded.rows.ready + len(fill(loaded, 1)) == 8


def test_leases_of_before_and_after_a_restore_are_told_apart() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    old = begun(machine, 1)

    assert begun(StalenessStateMachine.load(machine.state()), 1) != old


def test_more_rows_than_a_lease_has_are_refused_by_name() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    lease = begun(machine, 2) or 0

    with pytest.raises(ValueError, match="3 rows of lease 0, which has 2 running"):
        machine.handle(Accept(lease, 3, 0), 0.0)


def test_versions_are_one_for_all_or_one_for_each() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    lease = begun(machine, 3) or 0

    with pytest.raises(ValueError, match="3 rows\\) with 2 versions"):
        machine.handle(Accept(lease, 3, [0, 0]), 0.0)


def test_a_version_that_is_not_there_yet_is_refused() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4)
    lease = begun(machine, 1) or 0

    with pytest.raises(ValueError, match="version 1 while 0 is in training"):
        machine.handle(Accept(lease, 1, 1), 0.0)


def test_versions_only_go_up() -> None:
    machine = StalenessStateMachine(max_lag=1, rows_per_version=4, version=3)

    with pytest.raises(ValueError, match="versions go up"):
        machine.handle(Advance(3), 0.0)
    with pytest.raises(ValueError, match="a version between the two"):
        machine.handle(Serve(4), 0.0)


def test_what_cannot_have_been_trained_on_is_refused() -> None:
    with pytest.raises(ValueError, match="trained=1\\) of 0 rows"):
        StalenessStateMachine(max_lag=1, rows_per_version=4).handle(Advance(1, trained=1), 0.0)


@pytest.mark.parametrize("rows", [0, 9])
def test_a_lease_whose_last_row_would_always_be_too_old_is_refused_at_once(rows: int) -> None:
    with pytest.raises(ValueError, match="give 1 to 8"):
        StalenessStateMachine(max_lag=1, rows_per_version=4).handle(Begin("t", rows), 0.0)


@pytest.mark.parametrize("numbers", [(-1, 1, 1), (0, 0, 1), (0, 1, -1)])
def test_numbers_that_are_too_small_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(DeclarationError, match="from 1 for rows_per_version"):
        StalenessStateMachine(*numbers)


def test_a_ticket_names_one_request() -> None:
    machine = StalenessStateMachine(max_lag=0, rows_per_version=1)
    begun(machine, 1)
    machine.handle(Begin("t", 1), 0.0)

    with pytest.raises(InternalError, match="'t'"):
        machine.handle(Begin("t", 1), 0.0)
