"""Syncs between random layouts over every CPU transport, bit for bit, with ranks as threads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import BucketSlot, read_slot, write_slot
from phalanx.weights.digests import digest_boxes
from phalanx.weights.local_layout import read_tensors
from phalanx.weights.manifest import Tensors
from phalanx.weights.plan import Locality, Locations, RankLocation
from phalanx.weights.shared_memory import allocate_tensors, location_of, open_tensors
from phalanx.weights.transport_interface import ConnectRequest, Deadline, Endpoint, Outgoing
from phalanx.weights.transports import (
    COPY,
    CUDA_IPC,
    GLOO,
    NCCL,
    SHARED_MEMORY,
    make_endpoints,
    transport_choices,
)
from tests.weights.planning.layouts import Side, apart, golden, one_node, plan_of, read, sides
from tests.weights.weight_workers import same

CPU = torch.device("cpu")
_names = itertools.count()
SHAPES = [(48, 50), (3, 2)]
WHOLE = [read_tensors({"w": torch.zeros(4)}).manifest]


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def one_process(sources: int, targets: int) -> Locations:
    return Locations(*((RankLocation("node", "process"),) * count for count in (sources, targets)))


def mixed(sources: int, targets: int) -> Locations:
    """Two ranks of each side per node. Equal ranks of both sides share a process, as colocated roles do."""
    places = [RankLocation(f"node {rank // 2}", f"process {rank}") for rank in range(max(sources, targets))]
    return Locations(tuple(places[:sources]), tuple(places[:targets]))


PLACES = {COPY: one_process, SHARED_MEMORY: one_node, GLOO: apart, "mixed": mixed}


def version_of(tensors: Tensors) -> Outgoing:
    return Outgoing(lambda slot: read_slot(tensors, slot), lambda _: b"note", lambda: None)


def transfer(ends: list[Endpoint], tensors: Tensors, side: str, known: int) -> None:
    """Send or receive one version on one rank, which has version ``known``."""
    for end in ends:
        end.packing.known = known
        if side == "source":
            end.send(version_of(tensors), Deadline(30))
        else:
            end.receive(lambda slot: write_slot(tensors, slot), Deadline(30))


@pytest.mark.parametrize("transport", PLACES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    source=sides(SHAPES, [torch.float32]),
    target=sides(SHAPES, [torch.float32, torch.bfloat16]),
    delta=st.booleans(),
    loads=st.booleans(),
)
def test_every_target_rank_has_its_part_of_every_version(
    store: TCPStore, transport: str, source: Side, target: Side, delta: bool, loads: bool
) -> None:
    full = golden(SHAPES)
    places = PLACES[transport](source.ranks, target.ranks)
    blank = read(target, {name: torch.full_like(one, -1) for name, one in full.items()})
    plan = plan_of([one.manifest for one in read(source, full)], [one.manifest for one in blank], places)
    (transports,) = transport_choices(plan, places, "auto", is_shared=False)
    address = f"127.0.0.1:{store.port}"
    request = ConnectRequest(f"test {next(_names)}", plan, 4096, transports, store=address, delta=delta)
    senders = [make_endpoints(request, rank, CPU) for rank in range(source.ranks)]
    addresses = {rank: end.address for rank, ends in enumerate(senders) for end in ends if end.address}
    request = replace(request, side="target", addresses=addresses)
    receivers = [make_endpoints(request, rank, CPU) for rank in range(target.ranks)]
    arrived = [one.tensors for one in blank]
    with ThreadPoolExecutor(source.ranks + target.ranks) as threads:
        for version in (1, 2):
            full = {name: torch.where(one > 1, one + version, one) for name, one in full.items()}
            sent = [source.tensors(full, rank) for rank in range(source.ranks)]
            for tensor in arrived[0].values() if loads else ():  # a saved state replaces the last version
                tensor.fill_(version)
            known = [0 if loads and not rank else version - 1 for rank in range(target.ranks)]
            work = [(*rank, "source", version - 1) for rank in zip(senders, sent, strict=True)]
            work += [(ends, one, "target", n) for ends, one, n in zip(receivers, arrived, known, strict=True)]
            for future in [threads.submit(transfer, *rank) for rank in work]:
                future.result(60)
            assert all(same(one, target.tensors(full, rank)) for rank, one in enumerate(arrived))
            for rank, tensors in enumerate(arrived):
                for peer, boxes in digest_boxes(plan.of("target", rank), tensors, "target").items():
                    assert boxes == digest_boxes(plan.of("source", peer), sent[peer], "source")[rank]
    for end in itertools.chain(*senders, *receivers):
        assert transport in (end.transport, "mixed")
        end.close()
        end.close()


@pytest.mark.parametrize(
    ("source", "target", "override", "nodes", "expected"),
    [
        ("gpu0", "gpu1", "auto", 1, [CUDA_IPC, NCCL, SHARED_MEMORY]),
        ("gpu0", "gpu0", "auto", 1, [CUDA_IPC, SHARED_MEMORY]),  # NCCL refuses two ranks on a device
        ("gpu0", "gpu8", "auto", 2, [NCCL]),
        ("", "", "auto", 1, [SHARED_MEMORY]),
        ("gpu0", "", "auto", 1, [SHARED_MEMORY]),
        ("", "", "auto", 2, [GLOO]),
        ("gpu0", "", "auto", 2, [GLOO]),
        ("gpu0", "gpu1", GLOO, 1, [GLOO]),
        ("gpu0", "gpu1", NCCL, 1, [NCCL]),
        ("", "", CUDA_IPC, 1, [CUDA_IPC]),
    ],
)
def test_the_transport_depends_on_devices_and_nodes(
    source: str, target: str, override: str, nodes: int, expected: list[str]
) -> None:
    places = Locations((RankLocation("a", "s", source),), (RankLocation("ab"[nodes - 1], "t", target),))
    choices = transport_choices(plan_of(WHOLE, WHOLE, places), places, override, is_shared=False)

    locality = Locality.NODE if nodes == 1 else Locality.REMOTE
    assert list(dict.fromkeys(choice[locality] for choice in choices)) == expected


def single(near: str, places: Locations, store: str = "") -> ConnectRequest:
    """Return a request for one source rank and one target rank."""
    transports = {Locality.PROCESS: COPY, Locality.NODE: near, Locality.REMOTE: GLOO}
    return ConnectRequest("c", plan_of(WHOLE, WHOLE, places), 4096, transports, store=store)


@pytest.mark.parametrize("transport", [CUDA_IPC, NCCL])
def test_a_device_transport_refuses_host_tensors(transport: str) -> None:
    with pytest.raises(WeightsTransferError, match=f"'{transport}' needs all tensors of source rank 0"):
        make_endpoints(single(transport, one_node(1, 1)), 0, CPU)


def test_an_error_of_a_device_after_the_end_of_the_source_names_the_source() -> None:
    request, tensors = single(SHARED_MEMORY, one_node(1, 1)), {"w": torch.zeros(4)}
    (sender,) = make_endpoints(request, 0, CPU)
    (receiver,) = make_endpoints(replace(request, side="target", addresses={0: sender.address}), 0, CPU)

    def write(_: BucketSlot) -> torch.Tensor:
        sender.close()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, version_of(tensors), Deadline(30))
        with pytest.raises(WeightsTransferError, match="source rank 0 ended the connection"):
            receiver.receive(write, Deadline(30))
    assert sending.exception() is not None
    receiver.close()


def test_a_location_of_freed_memory_is_refused() -> None:
    memory, tensors = allocate_tensors({"w": torch.zeros(4)})
    location = location_of(tensors)
    memory.close()
    with pytest.raises(WeightsTransferError, match=r"memory for weights was freed"):
        open_tensors(location)


def test_an_unreachable_end_names_its_source_or_the_variable_for_the_network() -> None:
    request = single(SHARED_MEMORY, one_node(1, 1))
    (sender,) = make_endpoints(request, 0, CPU)
    sender.close()
    (far,) = make_endpoints(single(SHARED_MEMORY, apart(1, 1), "127.0.0.1:9"), 0, CPU)

    with pytest.raises(WeightsTransferError, match="source rank 0 cannot be reached on this node"):
        make_endpoints(replace(request, side="target", addresses={0: sender.address}), 0, CPU)
    with pytest.raises(WeightsTransferError, match="GLOO_SOCKET_IFNAME"):
        far.send(version_of({}), Deadline(0.5))
