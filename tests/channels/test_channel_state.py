"""A channel's home: what each event is answered, case by case; schedules of many are in test_channel_schedules."""

from __future__ import annotations

import pickle

import pytest

from phalanx.channels.channel_messages import (
    Accepted,
    Ack,
    Cancel,
    Close,
    CloseProducer,
    Drop,
    Dropped,
    Ended,
    Event,
    Expired,
    Finish,
    Freed,
    GiveBack,
    Given,
    Gone,
    HandOver,
    Instruction,
    LeaseOver,
    Loss,
    Lost,
    Moved,
    Put,
    Refused,
    Released,
    Take,
    Tick,
    Unfit,
    Unneeded,
    Withdrawn,
)
from phalanx.channels.channel_state import UNREADABLE, ChannelHome
from phalanx.errors import DeclarationError, InternalError

KILLED = "signal SIGKILL"


def put(
    home: ChannelHome,
    *names: str,
    rows: int | None = 4,
    nbytes: int = 40,
    by: str = "p",
    deadline: float | None = None,
) -> None:
    for name in names:
        home.handle(Put(name, by, f"ref {name}", nbytes, rows, deadline), 0.0)


def take(home: ChannelHome, ticket: str = "t", by: str = "c", **what: int) -> Given:
    (given,) = [each for each in home.handle(Take(ticket, by, **what), 0.0) if isinstance(each, Given)]
    return given


def shown(given: Given) -> list[tuple[int, int, int]]:
    return [(part.item.number, part.cut.start, part.cut.stop) for part in given.parts]


def of_type(done: list[Instruction], kind: type) -> list[Instruction]:
    return [each for each in done if isinstance(each, kind)]


def test_a_put_is_accepted_at_once_while_there_is_room() -> None:
    assert ChannelHome(1).handle(Put("a", "p", "ref", 8, 2), 0.0) == [Accepted("a", 0)]


def test_a_put_at_a_full_channel_waits_until_something_is_taken() -> None:
    home = ChannelHome(1)
    put(home, "a", "b")

    done = home.handle(Take("t", "c", items=1), 0.0)

    assert [type(each) for each in done] == [Given, Accepted]
    assert done[1] == Accepted("b", 1)


def test_a_put_that_does_not_want_to_wait_is_refused_and_nothing_of_it_counted() -> None:
    home = ChannelHome(1)
    put(home, "a")

    assert home.handle(Put("b", "p", "ref", deadline=0.0), 0.0) == [Refused("b", "full")]
    assert home.items.submitted == 1


def test_a_put_is_refused_when_its_deadline_passes() -> None:
    home = ChannelHome(1)
    put(home, "a", "b", deadline=3.0)

    assert home.wake_at == 3.0
    assert home.handle(Tick(), 2.9) == []
    assert home.handle(Tick(), 3.0) == [Refused("b", "full")]
    assert home.wake_at is None


def test_a_channel_bounded_by_bytes_counts_bytes() -> None:
    home = ChannelHome(100, by="bytes")
    put(home, "a", "b", nbytes=50)

    assert home.handle(Put("c", "p", "ref", nbytes=1), 0.0) == []


def test_an_item_larger_than_the_whole_channel_is_accepted_when_nothing_else_waits() -> None:
    home = ChannelHome(100, by="bytes")
    put(home, "a", "large", nbytes=1_000)

    take(home, items=1)

    assert (home.items.submitted, home.depth(0.0).waiting_bytes) == (2, 1_000)


def test_a_small_put_does_not_overtake_a_large_one() -> None:
    home = ChannelHome(100, by="bytes")
    put(home, "a", "large", nbytes=90)
    put(home, "small", nbytes=1, by="q")

    assert [part.item.payload for part in take(home, items=2).parts] == ["ref a", "ref large"]


def test_takers_are_served_in_order_of_arrival() -> None:
    home = ChannelHome()
    home.handle(Take("first", "c", items=2), 0.0)
    home.handle(Take("second", "d", items=1), 0.0)
    put(home, "a")

    done = home.handle(Put("b", "p", "ref"), 0.0)

    assert [each.ticket for each in of_type(done, Given)] == ["first"]


def test_a_taker_that_wants_more_than_fits_opens_the_channel_for_it() -> None:
    home = ChannelHome(1)
    put(home, "a", "b", "c")

    done = home.handle(Take("t", "c", items=3), 0.0)

    assert [type(each) for each in done] == [Accepted, Accepted, Given]


def test_rows_are_cut_out_of_items_of_any_size_and_the_rest_stays_in_front() -> None:
    home = ChannelHome()
    put(home, "a", "b", "c", rows=4)

    first, second = take(home, "1", rows=6), take(home, "2", rows=5)

    assert shown(first) == [(0, 0, 4), (1, 0, 2)]
    assert shown(second) == [(1, 2, 4), (2, 0, 3)]
    assert [part.is_whole for part in first.parts] == [True, False]


def test_the_shares_of_a_cut_item_sum_to_its_bytes() -> None:
    home = ChannelHome()
    put(home, "a", rows=3, nbytes=100)

    parts = [part for ticket in "123" for part in take(home, ticket, rows=1).parts]

    assert sum(part.nbytes for part in parts) == 100


def test_a_take_of_rows_meets_an_item_that_is_not_made_of_rows_and_takes_nothing() -> None:
    home = ChannelHome()
    put(home, "a", rows=None)

    done = home.handle(Take("t", "c", rows=1), 0.0)

    assert [type(each) for each in done] == [Unfit]
    assert home.items.waiting == 1


def test_a_take_that_misses_its_deadline_is_told_what_there_was_and_takes_nothing() -> None:
    home = ChannelHome()
    put(home, "a", rows=4)

    done = home.handle(Take("t", "c", rows=5, deadline=0.0), 0.0)

    assert done == [Expired("t", items=1, rows=4)]
    assert home.rows.waiting == 4


def test_behind_a_taker_that_expires_the_next_one_is_served() -> None:
    home = ChannelHome()
    home.handle(Take("large", "c", items=5, deadline=1.0), 0.0)
    home.handle(Take("small", "d", items=1), 0.0)
    put(home, "a")

    done = home.handle(Tick(), 1.0)

    assert [each.ticket for each in done] == ["large", "small"]


def test_acknowledged_items_are_delivered_and_their_bytes_let_go_of() -> None:
    home = ChannelHome()
    put(home, "a")
    given = take(home, items=1)

    done = home.handle(Ack(given.lease), 0.0)

    assert done == [Freed((given.parts[0].item,))]
    assert (home.items.delivered, home.rows.delivered) == (1, 4)


def test_an_item_cut_in_two_is_let_go_of_with_its_last_part() -> None:
    home = ChannelHome()
    put(home, "a", rows=4)
    first, second = take(home, "1", rows=3), take(home, "2", rows=1)

    assert home.handle(Ack(first.lease), 0.0) == []
    assert [type(each) for each in home.handle(Ack(second.lease), 0.0)] == [Freed]


def test_what_is_given_back_is_at_the_front_in_order_and_whole_again() -> None:
    home = ChannelHome()
    put(home, "a", "b", "c")
    first, second = take(home, "1", rows=6), take(home, "2", rows=2)

    home.handle(GiveBack(second.lease), 0.0)
    home.handle(GiveBack(first.lease), 0.0)

    assert shown(take(home, items=3)) == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]


def test_a_lease_ends_once() -> None:
    home = ChannelHome()
    put(home, "a")
    lease = take(home, items=1).lease
    home.handle(GiveBack(lease), 0.0)

    assert home.handle(Ack(lease), 0.0) == [LeaseOver(lease)]
    assert (home.items.waiting, home.items.delivered) == (1, 0)


def test_what_a_dead_consumer_had_not_acknowledged_goes_to_the_next() -> None:
    home = ChannelHome()
    put(home, "a", "b")
    take(home, "1", by="dead", items=1)
    home.handle(Take("2", "alive", items=2), 0.0)

    (given,) = home.handle(Gone("dead", KILLED), 0.0)

    assert isinstance(given, Given)
    assert shown(given) == [(0, 0, 4), (1, 0, 4)]


def test_items_of_a_dead_holder_are_lost_and_the_next_taker_is_told_once() -> None:
    home = ChannelHome()
    put(home, "a", "b", by="dead")
    put(home, "c", by="alive")
    home.handle(Gone("dead", KILLED), 0.0)

    told = home.handle(Take("1", "c", items=1), 0.0)

    assert told == [Lost("1", (Loss("dead", KILLED, items=2, rows=8),))]
    assert shown(take(home, "2", items=1)) == [(2, 0, 4)]
    assert (home.items.lost, home.rows.lost) == (2, 8)


def test_a_taker_that_waits_is_told_of_a_loss_at_once() -> None:
    home = ChannelHome()
    put(home, "a", by="dead")
    home.handle(Take("t", "c", items=2), 0.0)

    done = home.handle(Gone("dead", KILLED), 0.0)

    assert of_type(done, Lost) == [Lost("t", (Loss("dead", KILLED, items=1, rows=4),))]


def test_a_put_that_waited_when_its_process_died_is_named_among_the_losses() -> None:
    home = ChannelHome(1)
    put(home, "a", by="alive")
    put(home, "b", by="dead")

    home.handle(Gone("dead", KILLED), 0.0)

    assert home.losses == (Loss("dead", KILLED, puts=1),)
    assert home.items.submitted == 1


def test_an_item_in_the_hands_of_a_consumer_outlives_its_holder() -> None:
    home = ChannelHome()
    put(home, "a", by="dead")
    lease = take(home, items=1).lease

    home.handle(Gone("dead", KILLED), 0.0)
    home.handle(Ack(lease), 0.0)

    assert (home.items.delivered, home.items.lost, home.losses) == (1, 0, ())


def test_an_item_given_back_after_its_holder_died_is_lost() -> None:
    home = ChannelHome()
    put(home, "a", by="dead")
    lease = take(home, items=1).lease
    home.handle(Gone("dead", KILLED), 0.0)

    home.handle(GiveBack(lease), 0.0)

    assert home.losses == (Loss("dead", KILLED, items=1, rows=4),)


def test_items_that_a_consumer_could_not_read_are_lost_and_the_others_go_back() -> None:
    home = ChannelHome()
    put(home, "a", "b")
    lease = take(home, items=2).lease

    home.handle(GiveBack(lease, unreadable=frozenset({0})), 0.0)

    assert home.losses == (Loss("p", UNREADABLE, items=1, rows=4),)
    assert home.items.waiting == 1


def test_nobody_puts_after_its_death() -> None:
    home = ChannelHome()
    home.handle(Gone("dead", KILLED), 0.0)

    assert home.handle(Put("a", "dead", "ref"), 0.0) == [Refused("a", "producer gone")]


def test_a_producer_that_closes_is_released_when_its_last_item_is_delivered() -> None:
    home = ChannelHome()
    put(home, "a")

    assert home.handle(CloseProducer("p"), 0.0) == []
    lease = take(home, items=1).lease
    assert home.handle(Ack(lease), 0.0)[-1] == Released("p")


def test_a_producer_that_closes_puts_no_more_but_what_waited_comes_in() -> None:
    home = ChannelHome(1)
    put(home, "a", "b")
    home.handle(CloseProducer("p"), 0.0)

    assert home.handle(Put("c", "p", "ref"), 0.0) == [Refused("c", "producer closed")]
    take(home, "1", items=1)
    assert home.items.submitted == 2


def test_a_producer_that_hands_over_is_released_when_the_home_has_its_bytes() -> None:
    home = ChannelHome()
    put(home, "a")

    (handover,) = home.handle(CloseProducer("p", handoff=True), 0.0)
    assert isinstance(handover, HandOver)
    assert [item.payload for item in handover.items] == ["ref a"]

    assert home.handle(Moved("home", {0: "copy"}), 0.0) == [Released("p")]
    home.handle(Gone("p", "exit code 0"), 0.0)
    assert [(part.item.holder, part.item.payload) for part in take(home, items=1).parts] == [("home", "copy")]


def test_a_put_that_waited_when_its_producer_closed_is_handed_over_when_it_comes_in() -> None:
    home = ChannelHome(1)
    put(home, "a", "b")
    home.handle(CloseProducer("p", handoff=True), 0.0)

    done = home.handle(Take("t", "c", items=1), 0.0)

    assert [item.number for each in of_type(done, HandOver) for item in each.items] == [1]


def test_a_producer_is_not_released_while_a_consumer_reads_from_it() -> None:
    home = ChannelHome()
    put(home, "a")
    lease = take(home, items=1).lease
    home.handle(CloseProducer("p", handoff=True), 0.0)

    assert home.handle(Moved("home", {0: "copy"}), 0.0) == []
    assert Released("p") in home.handle(Ack(lease), 0.0)


def test_what_was_moved_while_a_consumer_could_not_read_it_is_not_lost() -> None:
    home = ChannelHome()
    put(home, "a")
    lease = take(home, items=1).lease
    home.handle(Moved("home", {0: "copy"}), 0.0)

    home.handle(GiveBack(lease, unreadable=frozenset({0})), 0.0)

    assert (home.items.waiting, home.items.lost) == (1, 0)


def test_a_copy_of_what_had_ended_before_it_came_is_not_needed() -> None:
    home = ChannelHome()
    put(home, "a")
    home.handle(Drop("d", "stale"), 0.0)

    assert home.handle(Moved("home", {0: "copy"}), 0.0) == [Unneeded("home", (0,))]


def test_what_is_dropped_by_request_is_counted_by_its_reason() -> None:
    home = ChannelHome()
    put(home, "a", "b", "c")

    done = home.handle(Drop("d", "stale", frozenset({0, 2})), 0.0)

    assert done[0] == Dropped("d", items=2, rows=8)
    assert (home.items.dropped, home.items.waiting, home.reasons) == (2, 1, {"stale": 2})


def test_a_finished_channel_gives_what_is_left_even_if_it_is_less_then_says_that_it_ended() -> None:
    home = ChannelHome()
    put(home, "a", rows=3)
    home.handle(Finish(), 0.0)

    given = take(home, "1", rows=8)
    home.handle(Ack(given.lease), 0.0)

    assert (shown(given), given.short) == ([(0, 0, 3)], True)
    assert home.handle(Take("2", "c", rows=8), 0.0) == [Ended("2", "finished")]
    assert home.handle(Put("z", "p", "ref"), 0.0) == [Refused("z", "finished")]


def test_at_the_end_a_taker_waits_for_what_another_consumer_may_yet_give_back() -> None:
    home = ChannelHome()
    put(home, "a")
    lease = take(home, "1", by="other", items=1).lease
    home.handle(Finish(), 0.0)

    assert home.handle(Take("2", "c", items=1), 0.0) == []
    assert [type(each) for each in home.handle(GiveBack(lease), 0.0)] == [Given]


def test_at_the_end_consumers_that_wait_with_leases_in_hand_do_not_wait_for_each_other() -> None:
    home = ChannelHome()
    put(home, "a", "b")
    take(home, "1", by="c", items=1)
    take(home, "2", by="d", items=1)
    home.handle(Finish(), 0.0)
    home.handle(Take("3", "c", items=1), 0.0)

    done = home.handle(Take("4", "d", items=1), 0.0)

    assert done[0] == Ended("3", "finished")


def test_closing_answers_everybody_and_drops_what_waits_for_the_reason_given() -> None:
    home = ChannelHome(1)
    put(home, "a", "b")

    done = home.handle(Close("the run ended"), 0.0)

    assert done[0] == Refused("b", "closed")
    assert home.reasons == {"the run ended": 1}
    assert home.handle(Take("t", "c", items=1), 0.0) == [Ended("t", "the run ended")]


def test_after_closing_a_lease_is_delivered_or_dropped() -> None:
    home = ChannelHome()
    put(home, "a", "b")
    first, second = take(home, "1", items=1), take(home, "2", items=1)
    home.handle(Close(), 0.0)

    home.handle(Ack(first.lease), 0.0)
    home.handle(GiveBack(second.lease), 0.0)

    assert (home.items.delivered, home.items.dropped) == (1, 1)


def test_a_request_that_is_cancelled_waits_no_longer() -> None:
    home = ChannelHome(1)
    put(home, "a", "b")

    assert home.handle(Cancel("b"), 0.0) == [Withdrawn("b", waited=True)]
    take(home, items=1)
    assert home.items.submitted == 1


def test_cancelling_what_was_answered_says_so() -> None:
    home = ChannelHome()
    put(home, "a")

    assert home.handle(Cancel("a"), 0.0) == [Withdrawn("a", waited=False)]


def test_a_saved_channel_goes_on_elsewhere_with_what_was_taken_waiting_again() -> None:
    home = ChannelHome(8)
    put(home, "a", "b", rows=4)
    first, _ = take(home, "1", rows=2), take(home, "2", rows=3)
    home.handle(Ack(first.lease), 0.0)

    loaded = ChannelHome.load(pickle.loads(pickle.dumps(home.state())), holder="driver")

    assert shown(take(loaded, rows=6)) == [(0, 2, 4), (1, 0, 4)]
    assert (loaded.rows.submitted, loaded.rows.delivered, loaded.rows.taken) == (8, 2, 6)
    assert all(part.item.holder == "driver" for lease in loaded.leases for part in lease.parts)


def test_saving_leaves_the_channel_as_it_was() -> None:
    home = ChannelHome()
    put(home, "a")
    lease = take(home, items=1).lease

    ChannelHome.load(home.state(), "driver").handle(Drop("d", "test"), 0.0)

    assert [type(each) for each in home.handle(Ack(lease), 0.0)] == [Freed]


def test_a_lease_from_before_a_restore_is_over() -> None:
    home = ChannelHome()
    put(home, "a", "b")
    old = take(home, items=1).lease
    loaded = ChannelHome.load(home.state(), "driver")

    new = take(loaded, items=1).lease

    assert new != old
    assert loaded.handle(Ack(old), 0.0) == [LeaseOver(old)]


def test_a_channel_saved_after_its_end_holds_nothing() -> None:
    home = ChannelHome()
    put(home, "a")
    take(home, items=1)
    home.handle(Close(), 0.0)

    loaded = ChannelHome.load(home.state(), "driver")

    assert (loaded.items.dropped, loaded.items.waiting) == (1, 0)
    assert loaded.items.is_balanced


def test_the_table_shows_depth_ages_and_rates() -> None:
    home = ChannelHome(2)
    put(home, "a", "b", "c", rows=4, nbytes=40)
    home.handle(Take("t", "c", items=1), 2.0)
    lease = home.leases[0].number
    home.handle(Ack(lease), 4.0)

    depth = home.depth(5.0)

    assert (depth.waiting, depth.waiting_rows, depth.waiting_bytes, depth.puts) == (2, 8, 80, 0)
    assert (depth.oldest_item, depth.oldest_lease) == (5.0, 0.0)
    assert (depth.accepted_per_second, depth.delivered_per_second) == (3 / 5, 1.0)


@pytest.mark.parametrize("what", [{}, {"items": 1, "rows": 1}, {"items": 0}, {"rows": -1}])
def test_a_take_of_nothing_or_of_two_things_is_refused(what: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        Take("t", "c", **what)


@pytest.mark.parametrize("options", [{"maxsize": 0}, {"maxsize": 1, "by": "rows"}])
def test_a_bound_that_cannot_be_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(DeclarationError, match="a channel"):
        ChannelHome(**options)  # type: ignore[arg-type]


def test_a_ticket_names_one_request() -> None:
    home = ChannelHome()
    event: Event = Take("t", "c", items=1)
    home.handle(event, 0.0)

    with pytest.raises(InternalError, match="'t'"):
        home.handle(event, 0.0)
