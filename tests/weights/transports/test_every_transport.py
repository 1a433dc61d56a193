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
from phalanx.weights.buckets import read_slot, write_slot
from phalanx.weights.plan import Locality, Locations, RankLocation
from phalanx.weights.tensors import Tensors
from phalanx.weights.transport_interface import (
    COPY,
    CUDA_IPC,
    GLOO,
    NCCL,
    SHARED_MEMORY,
    Deadline,
    Endpoint,
    transport_choices,
)
from phalanx.weights.weight_requests import ConnectRequest
from phalanx.weights.weight_routes import make_endpoints
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
    ends: list[list[Endpoint]], tensors: Sequence[Tensors], side: str, version: int
) -> list[tuple[Callable[[int], None], int]]:
    """The work of each rank of a side, for a thread each."""

    def work(rank: int) -> None:
        for end in ends[rank]:
            end.packing.begin(version - 1 or None)
            if side == "source":
                end.send(lambda slot: read_slot(tensors[rank], slot), lambda _: b"note", Deadline(30))
            else:
                end.receive(lambda slot: write_slot(tensors[rank], slot), Deadline(30))
            end.packing.end(version)

    return [(work, rank) for rank in range(len(ends))]


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
        "source",
        ("", "w"),
        (),
        plan,
        4096,
        transports,
        store=f"127.0.0.1:{store.port}",
        delta=delta,
    )
    senders = [make_endpoints(request, rank, CPU) for rank in range(source.ranks)]
    addresses = {rank: end.address for rank, ends in enumerate(senders) for end in ends}
    request = replace(request, side="target", addresses=addresses)
    receivers = [make_endpoints(request, rank, CPU) for rank in range(target.ranks)]
    arrived = blank(locals_of(target, named))
    with ThreadPoolExecutor(source.ranks + target.ranks) as threads:
        for end in itertools.chain(*receivers):
            end.connect(Deadline(30))
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
    for end in itertools.chain(*senders, *receivers):
        assert end.transport == transport
        end.close()
        end.close()


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


def single(near: str, places: Locations, store: str = "") -> ConnectRequest:
    """A request of one source rank with one target rank."""
    layout, named = Layout((1, 1, 1, 1, 1)), model([[4]])
    plan = plan_of(manifests(layout, named), manifests(layout, named), places)
    transports = {Locality.PROCESS: COPY, Locality.NODE: near, Locality.REMOTE: GLOO}
    return ConnectRequest("c", "source", ("", "w"), (0,), plan, 4096, transports, store=store)


@pytest.mark.parametrize("transport", [CUDA_IPC, NCCL])
def test_a_device_transport_of_host_tensors_is_refused_by_name(transport: str) -> None:
    with pytest.raises(
        WeightsTransferError, match=f"transport '{transport}' needs all tensors of source rank 0"
    ):
        make_endpoints(single(transport, one_node(1, 1)), 0, CPU)


def test_a_ring_that_is_closed_cannot_be_reached_and_names_its_source() -> None:
    request = single(SHARED_MEMORY, one_node(1, 1))
    (sender,) = make_endpoints(request, 0, CPU)
    sender.close()
    (receiver,) = make_endpoints(replace(request, side="target", addresses={0: sender.address}), 0, CPU)

    with pytest.raises(WeightsTransferError, match="source rank 0 cannot be reached on this node"):
        receiver.connect(Deadline(5))


def test_a_process_group_that_cannot_be_created_says_how_to_choose_the_network() -> None:
    (end,) = make_endpoints(single(SHARED_MEMORY, apart(1, 1), "127.0.0.1:9"), 0, CPU)

    with pytest.raises(WeightsTransferError, match="GLOO_SOCKET_IFNAME"):
        end.send(lambda slot: torch.zeros(4), lambda _: b"note", Deadline(2))
