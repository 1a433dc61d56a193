"""Tests of the contracts of a backend that groups rely on. A subclass provides a pool of 2 slots."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import phalanx as px
from phalanx.backends.backend_types import Backend, Endpoint, FetchFailed, Ref, ReserveRequest
from phalanx.wire.codec import encode
from phalanx.wire.messages import ANY_EPOCH, RankCall

_WITHIN_S = 60.0


class Small(px.Worker):
    """A worker with a method for each way in which a call ends."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @px.register
    def note(self, value: Any) -> list[Any]:
        """Return all values so far, in their order."""
        self.calls.append(value)
        return self.calls

    @px.register
    def refuse(self) -> None:
        """Raise."""
        raise ValueError(f"rank {self.rank} refuses")


def submit(backend: Backend, endpoint: Endpoint, method: str, *args: Any) -> Ref:
    """Send a call with its arguments in the message."""
    body = encode((args, {})).to_bytes()
    return backend.submit(endpoint, RankCall(ANY_EPOCH, "", method, body=body).pack()).value


class BackendContracts:
    """Contracts of a backend. A subclass has a fixture ``pool`` on the backend."""

    @pytest.fixture(scope="class")
    def group(self, pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
        """Two ranks for all tests of the class."""
        with px.WorkerGroup(pool, Small) as made:
            yield made

    @pytest.fixture(scope="class")
    def backend(self, group: px.WorkerGroup) -> Backend:
        """The backend of the group."""
        return group.core.backend

    @pytest.fixture(scope="class")
    def endpoints(self, group: px.WorkerGroup) -> Sequence[Endpoint]:
        """The processes of the group's ranks."""
        return group.core.endpoints

    def test_a_reservation_is_listed_until_its_release_which_can_be_repeated(self, backend: Backend) -> None:
        held = backend.reserve(ReserveRequest("held-for-a-test", (1,), {"CPU": 0.01}, timeout=_WITHIN_S))
        assert "held-for-a-test" in " ".join(holder.name for holder in backend.holders())
        backend.release(held.keys)
        backend.release(held.keys)
        assert "held-for-a-test" not in " ".join(holder.name for holder in backend.holders())

    def test_the_slots_of_a_block_are_on_the_node_of_their_ranks(
        self, pool: px.ResourcePool, backend: Backend, endpoints: Sequence[Endpoint]
    ) -> None:
        reservations = {name: holding.reservation for name, holding in pool.holdings.items()}
        nodes = backend.nodes_of(pool.slots, reservations)
        assert nodes == [endpoint.facts.slot.node_id for endpoint in endpoints]
        assert len(set(nodes)) == 1

    def test_killed_processes_are_dead_with_a_reason_and_can_be_killed_again(
        self, pool: px.ResourcePool, backend: Backend
    ) -> None:
        with px.WorkerGroup(pool, Small) as group:
            killed = group.core.endpoints
            before = backend.dead_of(killed), backend.inspect(killed, stacks=True)
            assert backend.kill(killed) == backend.kill(killed) == ()
            after = backend.dead_of(killed), backend.inspect(killed, stacks=False)
            assert backend.post_mortem(killed[0], None).reason
        assert (before[0], [status.reachable and not status.gone for status in before[1]]) == (
            [],
            [True, True],
        )
        assert (after[0], [status.gone and not status.reachable for status in after[1]]) == (
            [0, 1],
            [True, True],
        )

    def test_calls_run_in_order_and_a_finished_call_keeps_its_output_when_cancelled(
        self, backend: Backend, endpoints: Sequence[Endpoint]
    ) -> None:
        refs = [submit(backend, endpoints[0], "note", index) for index in range(5)]
        assert backend.fetch([refs[-1]], _WITHIN_S) == [[0, 1, 2, 3, 4]]
        assert len(backend.cancel(endpoints[:1], [backend.call_id(refs[-1])])) == 1
        assert backend.fetch([refs[-1]], _WITHIN_S) == [[0, 1, 2, 3, 4]]

    def test_a_failed_call_raises_when_fetched_and_can_be_disregarded(
        self, backend: Backend, endpoints: Sequence[Endpoint]
    ) -> None:
        refused = submit(backend, endpoints[1], "refuse")
        with pytest.raises(FetchFailed):
            backend.fetch([refused], _WITHIN_S)
        backend.disregard([submit(backend, endpoints[1], "refuse")])
        assert backend.wait([refused], 1, _WITHIN_S) == ([0], [])

    def test_stored_values_and_published_records_are_found_and_an_unknown_name_is_not(
        self, backend: Backend
    ) -> None:
        ref, key = backend.put(encode("here")), "contracts-of-a-backend"
        assert backend.fetch([ref, backend.at(backend.address_of(ref))], _WITHIN_S) == ["here", "here"]
        backend.publish(key, b"here")
        assert backend.published(key) == b"here"
        backend.publish(key, None)
        backend.publish(key, None)
        assert backend.published(key) is None
        assert backend.find("a-name-of-nobody:0") is None

    def test_a_service_starts_on_this_node_and_can_be_stopped_twice(self, backend: Backend) -> None:
        service, host = backend.start_service(str)
        with socket.create_server(("", 0)) as server:
            socket.create_connection((host, server.getsockname()[1]), timeout=_WITHIN_S).close()
        backend.stop_service(service)
        backend.stop_service(service)
