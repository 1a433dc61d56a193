"""Tests of the five contracts of a backend, without pools and groups; a subclass provides the transport.

Two slots with a tenth of a CPU are reserved once for all tests of a class.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.backends.backend_types import (
    Backend,
    Endpoint,
    Facade,
    FetchFailed,
    RankStream,
    Ref,
    Reservation,
    ReserveRequest,
    SpawnRequest,
    Ticket,
)
from phalanx.topology.slots import Slot
from phalanx.wire.codec import encode
from phalanx.wire.messages import ANY_EPOCH, DESCRIBED, OUTPUT, Message, RankCall, RankConfig, StreamEnd
from phalanx.worker.handlers import make_runtime

_POOL = "contracts"
_SLOT, _SHARE = {"CPU": 0.1}, {"CPU": 0.01}  # several processes fit in a slot
_WITHIN_S = 60.0


class Small(px.Worker):
    """A worker with a method for each way in which a call ends."""

    def __init__(self, refuse: bool = False) -> None:
        self.calls: list[Any] = []
        if refuse:
            raise ValueError("not to be made")

    def rank_of(self) -> int:
        """Needs no arguments."""
        return self.rank

    def note(self, value: Any) -> list[Any]:
        """All values that came, in their order."""
        self.calls.append(value)
        return self.calls

    def refuse(self) -> None:
        """Raises."""
        raise ValueError(f"rank {self.rank} refuses")

    def count(self, n: int, *, refuse: bool = False) -> Iterator[int]:
        """Yields so many numbers, and may raise then."""
        for self.counted in range(1, n + 1):
            yield self.counted
        if refuse:
            self.refuse()

    def counted_to(self) -> int:
        """The last of these numbers."""
        return self.counted


_NAMES = ("rank_of", "note", "refuse", "count", "counted_to")
_METHODS = tuple(Facade(name, "", name) for name in _NAMES)


class _Ranks:
    """Slots, processes and ranks for the tests of a class; ``transport`` is the subclass's own fixture."""

    @pytest.fixture(scope="class")
    def reservation(self, transport: Backend) -> Iterator[Reservation]:
        """Two slots on one node."""
        held = transport.reserve(ReserveRequest(_POOL, (2,), _SLOT, timeout=_WITHIN_S))
        yield held
        transport.release(held.keys)

    @pytest.fixture(scope="class")
    def endpoints(self, transport: Backend, reservation: Reservation) -> Iterator[list[Endpoint]]:
        """A rank in each of them."""
        made = self.spawned(transport, reservation)
        tickets = [self.become(transport, made, rank) for rank in range(2)]
        transport.fetch([ticket.value for ticket in tickets], _WITHIN_S)
        yield made
        transport.kill(made)

    def spawned(self, transport: Backend, reservation: Reservation) -> list[Endpoint]:
        """Processes that are no ranks yet."""
        slots = tuple(Slot(0, bundle, _POOL) for bundle in range(2))
        return transport.spawn(
            SpawnRequest(
                "Small", _METHODS, slots, {_POOL: reservation}, _SHARE, make_runtime, timeout=_WITHIN_S
            )
        )

    def become(
        self, transport: Backend, endpoints: Sequence[Endpoint], rank: int, **arguments: Any
    ) -> Ticket:
        """Make one of them a rank of two."""
        setup = RankConfig(rank, 2, rank, 2, _POOL, 0, {})
        body = encode({"": (Small, (), arguments)}).to_bytes()
        return transport.setup(endpoints[rank], setup.pack(body), ())

    def call(
        self, transport: Backend, endpoint: Endpoint, method: str, *args: Any, returns: int = OUTPUT
    ) -> Ticket:
        """Send a call with its arguments in the message."""
        body = encode((args, {})).to_bytes()
        return transport.submit(endpoint, message(method, body, returns), returns)

    def stream(
        self, transport: Backend, endpoint: Endpoint, n: int, buffer: int | None = None, **options: Any
    ) -> RankStream:
        """Send a call of the method that yields."""
        body = encode(((n,), options)).to_bytes()
        return transport.stream(endpoint, message("count", body), buffer)

    def taken(self, transport: Backend, stream: RankStream) -> Ref:
        """The next reference of a stream, waiting for it."""
        while (ref := stream.take()) is None:
            assert transport.wait([stream.coming], 1, _WITHIN_S)[0]
        return ref


def message(method: str, body: bytes | None, returns: int = OUTPUT, refs: tuple[Ref, ...] = ()) -> Message:
    """A packed call; ``body`` None: the last reference holds the arguments."""
    return RankCall(ANY_EPOCH, "", method, returns=returns, body=body).pack(refs)


class PlacingContract(_Ranks):
    """Slots, and the processes on them."""

    def test_nodes_tell_what_they_have_and_what_is_free(self, transport: Backend) -> None:
        assert all(node.total["CPU"] >= node.available.get("CPU", 0.0) > 0 for node in transport.nodes()[:1])

    def test_what_can_never_be_placed_is_refused_at_once(self, transport: Backend) -> None:
        with pytest.raises(px.PlacementError, match="accelerator-of-nobody"):
            transport.reserve(
                ReserveRequest("never", (1,), {"accelerator-of-nobody": 1.0}, timeout=_WITHIN_S)
            )

    def test_what_is_held_is_told_until_it_is_released(self, transport: Backend) -> None:
        held = transport.reserve(ReserveRequest("held-for-a-test", (1,), {"CPU": 0.01}, timeout=_WITHIN_S))
        assert "held-for-a-test" in " ".join(holder.name for holder in transport.holders())
        transport.release(held.keys)
        transport.release(held.keys)
        assert "held-for-a-test" not in " ".join(holder.name for holder in transport.holders())

    def test_the_slots_of_a_block_lie_on_one_node(
        self, transport: Backend, reservation: Reservation, endpoints: list[Endpoint]
    ) -> None:
        slots = [endpoint.slot for endpoint in endpoints]
        nodes = transport.nodes_of(slots, {_POOL: reservation})
        assert nodes == [endpoint.facts.slot.node_id for endpoint in endpoints]
        assert len(set(nodes)) == 1

    def test_processes_end_when_they_are_killed_also_twice(
        self, transport: Backend, reservation: Reservation
    ) -> None:
        made = self.spawned(transport, reservation)
        assert transport.kill(made) == ()
        assert len(transport.dead_of(made)) == len(made)
        assert transport.dead_of(made) == list(range(len(made)))
        assert transport.kill(made) == ()

    def test_nobody_bears_a_name_that_was_never_given(self, transport: Backend) -> None:
        assert transport.find("a-name-of-nobody:0") is None


class CallingContract(_Ranks):
    """Calls on processes."""

    def test_calls_run_in_the_order_in_which_they_were_submitted(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        tickets = [self.call(transport, endpoints[0], "note", index) for index in range(5)]
        last = transport.fetch([tickets[-1].value], _WITHIN_S)[0]
        assert last[-5:] == [0, 1, 2, 3, 4]

    def test_a_call_without_arguments_is_told_by_its_name(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        call = RankCall(ANY_EPOCH, "", "rank_of").pack()
        assert call == Message("rank_of@-1")
        tickets = [transport.submit(endpoint, call) for endpoint in endpoints]
        assert transport.fetch([ticket.value for ticket in tickets], _WITHIN_S) == [0, 1]

    def test_a_described_output_comes_with_its_rows(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        ticket = self.call(transport, endpoints[1], "rank_of", returns=DESCRIBED)
        info, value = transport.fetch([ticket.info, ticket.value], _WITHIN_S)
        assert (info.rows, value) == (None, 1)

    def test_what_a_rank_raises_is_the_outcome_of_its_call(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        refused = self.call(transport, endpoints[1], "refuse").value
        with pytest.raises(FetchFailed):
            transport.fetch([refused], _WITHIN_S)
        failure = transport.outcome(refused).failure
        assert failure is not None
        assert (failure.report.rank, failure.report.message) == (1, "rank 1 refuses")

    def test_a_process_whose_worker_cannot_be_made_says_why(
        self, transport: Backend, reservation: Reservation
    ) -> None:
        made = self.spawned(transport, reservation)
        outcome = transport.outcome(self.become(transport, made, 0, refuse=True).value)
        transport.kill(made)
        assert outcome.failure is not None
        assert outcome.failure.report.method == "__init__"

    def test_waiting_parts_what_has_ended_from_the_rest(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        refs = [self.call(transport, endpoint, "rank_of").value for endpoint in endpoints]
        assert transport.wait(refs, 2, _WITHIN_S) == ([0, 1], [])

    def test_a_call_that_has_ended_is_not_dropped(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        ticket = self.call(transport, endpoints[0], "rank_of")
        transport.fetch([ticket.value], _WITHIN_S)
        assert len(transport.cancel(endpoints[:1], [transport.call_id(ticket.value)])) == 1
        assert transport.fetch([ticket.value], _WITHIN_S) == [0]

    def test_items_of_a_method_that_yields_come_in_order_and_last_its_end(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        stream = self.stream(transport, endpoints[0], 3)
        refs = [self.taken(transport, stream) for _ in range(4)]
        assert transport.fetch(refs, _WITHIN_S) == [1, 2, 3, StreamEnd(3)]
        assert transport.wait([stream.ended], 1, _WITHIN_S) == ([0], [])
        assert stream.take() is None

    def test_a_rank_makes_no_more_items_than_there_is_room_for(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        stream = self.stream(transport, endpoints[0], 50, buffer=2)
        taken = transport.fetch([self.taken(transport, stream) for _ in range(5)], _WITHIN_S)
        assert transport.wait([stream.ended], 1, 0) == ([], [0])
        while transport.outcome(self.taken(transport, stream)).value != StreamEnd(50):
            pass
        assert taken == [1, 2, 3, 4, 5]

    def test_what_a_rank_raises_is_the_last_of_its_stream(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        stream = self.stream(transport, endpoints[1], 1, refuse=True)
        first, last = (self.taken(transport, stream) for _ in range(2))
        assert transport.fetch([first], _WITHIN_S) == [1]
        failure = transport.outcome(last).failure
        assert failure is not None
        assert failure.report.message == "rank 1 refuses"

    def test_a_stream_that_is_cancelled_and_left_comes_to_its_end(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        stream = self.stream(transport, endpoints[0], 200, buffer=2)
        first = self.taken(transport, stream)
        transport.cancel(endpoints[:1], [transport.call_id(stream.ended)])
        stream.leave()
        while not transport.wait([stream.ended], 1, 0)[0]:
            transport.wait([stream.ended, stream.coming], 1, _WITHIN_S)
            stream.take()
        assert transport.fetch([first], _WITHIN_S) == [1]

    def test_an_outcome_that_nobody_asks_for_may_be_disregarded(
        self, transport: Backend, endpoints: list[Endpoint]
    ) -> None:
        transport.disregard([self.call(transport, endpoints[0], "refuse").value])
        assert transport.fetch([self.call(transport, endpoints[0], "rank_of").value], _WITHIN_S) == [0]

    def test_the_clock_does_not_go_back(self, transport: Backend) -> None:
        assert transport.now() <= transport.now()


class StoringContract(_Ranks):
    """Values behind references."""

    def test_a_stored_value_can_be_fetched_as_often_as_one_likes(self, transport: Backend) -> None:
        ref = transport.put(encode([1, 2]))
        assert transport.fetch([ref, ref], _WITHIN_S) == [[1, 2], [1, 2]]

    def test_what_users_may_hold_is_of_its_reference_types(self, transport: Backend) -> None:
        assert isinstance(transport.put(1), transport.ref_types())

    def test_arguments_may_lie_in_the_store(self, transport: Backend, endpoints: list[Endpoint]) -> None:
        ref = transport.put(encode((("stored",), {})))
        ticket = transport.submit(endpoints[1], message("note", None, refs=(ref,)))
        assert transport.fetch([ticket.value], _WITHIN_S)[0][-1] == "stored"

    def test_a_stored_value_is_found_at_its_address(self, transport: Backend) -> None:
        ref = transport.put(encode("here"))
        assert transport.fetch([transport.at(transport.address_of(ref))], _WITHIN_S) == ["here"]

    def test_a_bounded_store_has_no_more_free_than_it_holds(self, transport: Backend) -> None:
        space = transport.store()
        assert space is None or 0 <= space.free <= space.capacity


class WatchingContract(_Ranks):
    """Processes as seen from beside them."""

    def test_a_rank_is_alive_and_reachable(self, transport: Backend, endpoints: list[Endpoint]) -> None:
        assert not transport.dead_of(endpoints)
        assert transport.dead_of(endpoints) == []
        sights = transport.sights(endpoints, stacks=True)
        assert all(sight.reachable and not sight.gone for sight in sights)

    def test_a_rank_that_was_ended_is_neither_and_there_is_a_reason(
        self, transport: Backend, reservation: Reservation
    ) -> None:
        made = self.spawned(transport, reservation)
        transport.kill(made)
        assert all(sight.gone and not sight.reachable for sight in transport.sights(made, stacks=False))
        assert transport.post_mortem(made[0], None).reason

    def test_files_of_its_node_can_be_read(
        self, transport: Backend, endpoints: list[Endpoint], tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_bytes(b"0123456789")
        path = str(tmp_path / "file")
        assert transport.read(endpoints[0], path, 2, 3) == b"234"
        assert transport.read(endpoints[0], path, -2, 9) == b"89"

    def test_a_file_that_is_not_there_is_said_so(
        self, transport: Backend, endpoints: list[Endpoint], tmp_path: Path
    ) -> None:
        with pytest.raises(FileNotFoundError):
            transport.read(endpoints[0], str(tmp_path / "none"), 0, 1)


class NoticingContract(_Ranks):
    """What a driver leaves for others to find."""

    def test_a_notice_can_be_left_and_taken_back_also_twice(self, transport: Backend) -> None:
        assert isinstance(transport.job(), str)
        key = "contracts-of-a-transport"
        transport.publish(key, b"here")
        assert transport.published(key) == b"here"
        transport.publish(key, None)
        transport.publish(key, None)
        assert transport.published(key) is None

    def test_no_node_is_said_to_go_where_nobody_takes_one_away(self, transport: Backend) -> None:
        assert list(transport.draining_nodes(ended=True)) == []

    def test_a_service_starts_on_this_node_and_may_be_stopped_twice(self, transport: Backend) -> None:
        service, host = transport.start_service(str)
        with socket.create_server(("", 0)) as server:
            socket.create_connection((host, server.getsockname()[1]), timeout=_WITHIN_S).close()
        transport.stop_service(service)
        transport.stop_service(service)


class BackendContracts(PlacingContract, CallingContract, StoringContract, WatchingContract, NoticingContract):
    """All five: subclass it, or those that a backend meets so far, with a fixture ``transport``."""
