"""Any layout to any other over every transport of the CPU: bit for bit, with the ranks of both sides as threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from phalanx.errors import WeightsTransferError
from phalanx.weights.bucket_packing import DeltaPacking
from phalanx.weights.plan import Locality, Locations, RankLocation
from phalanx.weights.tensors import Tensors, read_slot, write_slot
from phalanx.weights.transport import (
    COPY,
    CUDA_IPC,
    GLOO,
    NCCL,
    SHARED_MEMORY,
    Deadline,
    transport_choices,
)
from phalanx.weights.weight_requests import ConnectRequest, WeightsName
from phalanx.weights.weight_routes import Route, make_routes
from tests.weights.planning.layouts import (
    Layout,
    apart,
    blank,
    locals_of,
    manifests,
    model,
    one_node,
    plan_of,
)

CPU = torch.device("cpu")
_names = itertools.count()
few_ranks = st.builds(
    Layout,
    st.sampled_from([(1, 1, 1, 1, 1), (1, 1, 4, 1, 1), (1, 1, 2, 1, 2), (2, 1, 1, 1, 2), (1, 2, 1, 2, 1)]),
    st.sampled_from([0, 1, None]),
    st.sampled_from([0, 1, None]),
    st.booleans(),
)


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def one_process(sources: int, targets: int) -> Locations:
    return Locations(*((RankLocation("node", "process"),) * count for count in (sources, targets)))


PLACES = {COPY: one_process, SHARED_MEMORY: one_node, GLOO: apart}


def synced(
    routes: list[list[Route]], tensors: Sequence[Tensors], side: str, version: int
) -> list[tuple[Callable[[int], None], int]]:
    """The work of each rank of a side, for a thread each."""

    def work(rank: int) -> None:
        for route in routes[rank]:
            if isinstance(route.packing, DeltaPacking):
                route.packing.begin(version - 1 or None)
            deadline = Deadline(30)
            if side == "source":
                route.endpoint.send(
                    route.streams[rank], lambda slot: read_slot(tensors[rank], slot), lambda _: b"", deadline
                )
            else:
                route.endpoint.receive(route.streams, lambda slot: write_slot(tensors[rank], slot), deadline)
            if isinstance(route.packing, DeltaPacking):
                route.packing.end(version)

    return [(work, rank) for rank in range(len(routes))]


@pytest.mark.parametrize("transport", [COPY, SHARED_MEMORY, GLOO])
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(source=few_ranks, target=few_ranks, delta=st.booleans())
def test_every_target_rank_has_its_part_of_every_version(
    store: TCPStore, transport: str, source: Layout, target: Layout, delta: bool
) -> None:
    named = model([[24, 50], [3, 2]])
    places = PLACES[transport](source.ranks, target.ranks)
    plan = plan_of(manifests(source, named), manifests(target, named), places)
    (transports,) = transport_choices(plan, places, "auto", is_shared=False)
    request = ConnectRequest(
        f"test {next(_names)}",
        WeightsName("source", "", "w"),
        (),
        plan,
        None,
        4096,
        transports,
        store=f"127.0.0.1:{store.port}",
        delta=delta,
    )
    senders = [make_routes(request, "source", rank, CPU) for rank in range(source.ranks)]
    addresses = {rank: route.endpoint.address for rank, routes in enumerate(senders) for route in routes}
    request = replace(request, addresses=addresses)
    receivers = [make_routes(request, "target", rank, CPU) for rank in range(target.ranks)]
    arrived = blank(locals_of(target, named))
    with ThreadPoolExecutor(source.ranks + target.ranks) as threads:
        for route in itertools.chain(*receivers):
            route.endpoint.connect(Deadline(30))
        for version in (1, 2):
            named = {name: one + version for name, one in named.items()}
            sent = locals_of(source, named)
            work = [
                *synced(senders, sent, "source", version),
                *synced(receivers, arrived, "target", version),
            ]
            for future in [threads.submit(function, rank) for function, rank in work]:
                future.result(60)
            wanted = locals_of(target, named)
            assert all(
                torch.equal(a[name], b[name]) for a, b in zip(arrived, wanted, strict=True) for name in b
            )
    for route in itertools.chain(*senders, *receivers):
        assert route.transport == transport
        route.endpoint.close()
        route.endpoint.close()


def choices(
    devices: tuple[str, ...], targets: tuple[str, ...], override: str = "auto", nodes: int = 1
) -> list[tuple[str, str]]:
    """(transport on the node, transport between nodes) in order of preference, by devices of both sides."""
    named = {"layers.0.w": torch.zeros(4)}
    layout = Layout((1, len(devices), 1, 1, 1)), Layout((1, len(targets), 1, 1, 1))
    places = Locations(
        tuple(RankLocation("a", f"s{n}", device) for n, device in enumerate(devices)),
        tuple(RankLocation("ab"[nodes - 1], f"t{n}", device) for n, device in enumerate(targets)),
    )
    plan = plan_of(manifests(layout[0], named), manifests(layout[1], named), places)
    found = transport_choices(plan, places, override, is_shared=False)
    return [(one[Locality.NODE], one[Locality.REMOTE]) for one in found]


def test_device_tensors_on_a_node_go_by_cuda_ipc_then_nccl_then_host_memory() -> None:
    found = [near for near, _ in choices(("gpu0",), ("gpu1",))]

    assert found == [CUDA_IPC, NCCL, SHARED_MEMORY]


def test_nccl_is_no_choice_for_two_ranks_on_a_device() -> None:
    assert [near for near, _ in choices(("gpu0",), ("gpu0",))] == [CUDA_IPC, SHARED_MEMORY]


def test_device_tensors_between_nodes_go_by_nccl() -> None:
    assert {far for _, far in choices(("gpu0",), ("gpu8",), nodes=2)} == {NCCL}


@pytest.mark.parametrize(("devices", "targets"), [(("",), ("",)), (("gpu0",), ("",))])
def test_host_tensors_go_by_shared_memory_and_gloo(devices: tuple[str], targets: tuple[str]) -> None:
    assert [near for near, _ in choices(devices, targets)] == [SHARED_MEMORY]
    assert {far for _, far in choices(devices, targets, nodes=2)} == {GLOO}


@pytest.mark.parametrize("override", [GLOO, NCCL])
def test_a_process_group_can_be_chosen_for_a_node_too(override: str) -> None:
    assert choices(("gpu0",), ("gpu1",), override) == [(override, override)]


def test_cuda_ipc_can_be_chosen_without_a_fallback() -> None:
    assert [near for near, _ in choices(("",), ("",), CUDA_IPC)] == [CUDA_IPC]


@pytest.mark.parametrize("transport", [CUDA_IPC, NCCL])
def test_a_device_transport_of_host_tensors_is_refused_by_name(transport: str) -> None:
    layout, named = Layout((1, 1, 1, 1, 1)), model([[4]])
    plan = plan_of(manifests(layout, named), manifests(layout, named), one_node(1, 1))
    transports = {Locality.PROCESS: COPY, Locality.NODE: transport, Locality.REMOTE: transport}
    request = ConnectRequest("c", WeightsName("source", "", "w"), (0,), plan, None, 4096, transports)

    with pytest.raises(
        WeightsTransferError, match=f"transport '{transport}' needs all tensors of source rank 0"
    ):
        make_routes(request, "source", 0, CPU)


def test_a_ring_that_is_closed_cannot_be_reached_and_names_its_source() -> None:
    layout, named = Layout((1, 1, 1, 1, 1)), model([[4]])
    plan = plan_of(manifests(layout, named), manifests(layout, named), one_node(1, 1))
    transports = {Locality.PROCESS: COPY, Locality.NODE: SHARED_MEMORY, Locality.REMOTE: GLOO}
    request = ConnectRequest("c", WeightsName("source", "", "w"), (0,), plan, None, 4096, transports)
    (sender,) = make_routes(request, "source", 0, CPU)
    sender.endpoint.close()
    request = replace(request, addresses={0: sender.endpoint.address})
    (receiver,) = make_routes(request, "target", 0, CPU)

    with pytest.raises(WeightsTransferError, match="source rank 0 cannot be reached on this node"):
        receiver.endpoint.connect(Deadline(5))


def test_a_process_group_that_cannot_be_created_says_how_to_choose_the_network() -> None:
    layout, named = Layout((1, 1, 1, 1, 1)), model([[4]])
    plan = plan_of(manifests(layout, named), manifests(layout, named), apart(1, 1))
    transports = {Locality.PROCESS: COPY, Locality.NODE: SHARED_MEMORY, Locality.REMOTE: GLOO}
    name = WeightsName("source", "", "w")
    request = ConnectRequest("c", name, (0,), plan, None, 4096, transports, store="127.0.0.1:9")
    (route,) = make_routes(request, "source", 0, CPU)

    with pytest.raises(WeightsTransferError, match="GLOO_SOCKET_IFNAME"):
        route.endpoint.send(route.streams[0], lambda slot: torch.zeros(4), lambda _: b"", Deadline(2))
