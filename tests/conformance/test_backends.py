"""Contracts of a backend that groups rely on: its methods called directly, on each backend."""

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
    def __init__(self) -> None:
        self.calls: list[Any] = []

    @px.register
    def note(self, value: Any) -> list[Any]:
        self.calls.append(value)
        return self.calls

    @px.register
    def refuse(self) -> None:
        raise ValueError(f"rank {self.rank} refuses")


def submit(backend: Backend, endpoint: Endpoint, method: str, *args: Any) -> Ref:
    """Send a call with its arguments in the message."""
    body = encode((args, {})).to_bytes()
    return backend.submit(endpoint, RankCall(ANY_EPOCH, "", method, body=body).pack()).value


@pytest.fixture(scope="module")
def two(pool: px.ResourcePool) -> px.ResourcePool:
    return pool[0:2]


@pytest.fixture(scope="module")
def group(two: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(two, Small) as made:
        yield made


@pytest.fixture(scope="module")
def direct(group: px.WorkerGroup) -> Backend:
    return group.core.backend


@pytest.fixture(scope="module")
def endpoints(group: px.WorkerGroup) -> Sequence[Endpoint]:
    return group.core.endpoints


def test_a_reservation_is_listed_until_its_release_which_can_be_repeated(direct: Backend) -> None:
    held = direct.reserve(ReserveRequest("held-for-a-test", (1,), {"CPU": 0.01}, timeout=_WITHIN_S))
    assert "held-for-a-test" in " ".join(holder.name for holder in direct.holders())
    direct.release(held.keys)
    direct.release(held.keys)
    assert "held-for-a-test" not in " ".join(holder.name for holder in direct.holders())


def test_the_slots_of_a_block_are_on_the_node_of_their_ranks(
    two: px.ResourcePool, direct: Backend, endpoints: Sequence[Endpoint]
) -> None:
    reservations = {name: holding.reservation for name, holding in two.holdings.items()}
    nodes = direct.nodes_of(two.slots, reservations)
    assert nodes == [endpoint.facts.slot.node_id for endpoint in endpoints]
    assert len(set(nodes)) == 1


def test_killed_processes_are_dead_with_a_reason_and_can_be_killed_again(
    two: px.ResourcePool, direct: Backend
) -> None:
    with px.WorkerGroup(two, Small) as group:
        killed = group.core.endpoints
        before = direct.dead_of(killed), direct.inspect(killed, stacks=True)
        assert direct.kill(killed) == direct.kill(killed) == ()
        after = direct.dead_of(killed), direct.inspect(killed, stacks=False)
        assert direct.post_mortem(killed[0], None).reason
    assert (before[0], [status.reachable and not status.gone for status in before[1]]) == ([], [True, True])
    assert (after[0], [status.gone and not status.reachable for status in after[1]]) == ([0, 1], [True, True])


def test_calls_run_in_order_and_a_finished_call_keeps_its_output_when_cancelled(
    direct: Backend, endpoints: Sequence[Endpoint]
) -> None:
    refs = [submit(direct, endpoints[0], "note", index) for index in range(5)]
    assert direct.fetch([refs[-1]], _WITHIN_S) == [[0, 1, 2, 3, 4]]
    assert len(direct.cancel(endpoints[:1], [direct.call_id(refs[-1])])) == 1
    assert direct.fetch([refs[-1]], _WITHIN_S) == [[0, 1, 2, 3, 4]]


def test_a_failed_call_raises_when_fetched_and_can_be_disregarded(
    direct: Backend, endpoints: Sequence[Endpoint]
) -> None:
    refused = submit(direct, endpoints[1], "refuse")
    with pytest.raises(FetchFailed):
        direct.fetch([refused], _WITHIN_S)
    direct.disregard([submit(direct, endpoints[1], "refuse")])
    assert direct.wait([refused], 1, _WITHIN_S) == ([0], [])


def test_stored_values_and_published_records_are_found_and_an_unknown_name_is_not(direct: Backend) -> None:
    ref, key = direct.put(encode("here")), "contracts-of-a-backend"
    assert direct.fetch([ref, direct.at(direct.address_of(ref))], _WITHIN_S) == ["here", "here"]
    direct.publish(key, b"here")
    assert direct.published(key) == b"here"
    direct.publish(key, None)
    direct.publish(key, None)
    assert direct.published(key) is None
    assert direct.find("a-name-of-nobody:0") is None


def test_a_service_starts_on_this_node_and_can_be_stopped_twice(direct: Backend) -> None:
    service, host = direct.start_service(str)
    with socket.create_server(("", 0)) as server:
        socket.create_connection((host, server.getsockname()[1]), timeout=_WITHIN_S).close()
    direct.stop_service(service)
    direct.stop_service(service)
