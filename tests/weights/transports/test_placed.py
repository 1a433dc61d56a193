"""Sources that write into what their targets load from, as processes; and the segments themselves."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.transports.segments import host_segments
from phalanx.weights.transports.shared_segment import PlacedTensors, SeenTensors
from tests.weights.transports import peers
from tests.weights.transports.conftest import Sides
from tests.weights.transports.test_between_processes import PLAN, fails, sync


def test_weights_arrive_bit_for_bit_sync_after_sync(placed_sides: Sides) -> None:
    assert all(sync(placed_sides, version) for version in (1, 2, 3))


def test_a_target_is_not_written_to_before_it_says_so(placed_sides: Sides) -> None:
    assert sync(placed_sides, 1)
    for rank, peer in enumerate(placed_sides.sources):
        peer.begin(peers.send, PLAN, rank, 2, 30.0)
    placed_sides.targets[1].begin(peers.receive, PLAN, 1, 30.0)
    with pytest.raises(TimeoutError):
        placed_sides.sources[0].result(0.5)

    before = placed_sides.targets[0].do(peers.placed_values)
    placed_sides.targets[0].begin(peers.receive, PLAN, 0, 30.0)
    after = placed_sides.targets[0].result()

    assert all((after[name] == before[name] + 1).all() for name in before)


def test_a_source_that_dies_in_the_middle_is_known_to_its_targets_at_once(placed_sides: Sides) -> None:
    placed_sides.sources[0].begin(peers.send, PLAN, 0, 1, 60.0, 5)
    placed_sides.sources[1].begin(peers.send, PLAN, 1, 1, 60.0)
    for rank, peer in enumerate(placed_sides.targets):
        peer.begin(peers.receive, PLAN, rank, 60.0)
    placed_sides.sources[0].process.join()

    errors = [fails(peer, 4.0) for peer in placed_sides.targets]
    with contextlib.suppress(WeightsTransferError):  # its targets may have had all of it before they knew
        placed_sides.sources[1].result(5.0)
    placed_sides.replace("source", 0)
    placed_sides.connect()

    assert "source rank 0" in [error.peer for error in errors]
    assert sync(placed_sides, 2)


def test_a_target_that_dies_is_known_to_its_sources_at_once(placed_sides: Sides) -> None:
    for rank, peer in enumerate(placed_sides.sources):
        peer.begin(peers.send, PLAN, rank, 1, 60.0)
    placed_sides.targets[0].kill()

    assert [fails(peer, 4.0).peer for peer in placed_sides.sources] == ["target rank 0"] * 2


def test_file_descriptors_do_not_grow(placed_sides: Sides) -> None:
    assert sync(placed_sides, 0)
    before = [peer.do(peers.open_fds) for peer in placed_sides.all]
    for version in range(1, 6):
        placed_sides.connect()
        assert sync(placed_sides, version)

    assert [peer.do(peers.open_fds) for peer in placed_sides.all] == before


def test_others_see_the_same_memory() -> None:
    placed = PlacedTensors({"a": torch.empty(3, 5, device="meta"), "b": torch.empty(0, dtype=torch.bfloat16)})
    seen = SeenTensors(placed.layout, os.dup(placed.fd))
    seen.tensors["a"].fill_(2.0)

    assert torch.equal(placed.tensors["a"], torch.full((3, 5), 2.0))
    assert {name: (one.dtype, one.shape) for name, one in seen.tensors.items()} == {
        name: (one.dtype, one.shape) for name, one in placed.tensors.items()
    }
    assert PlacedTensors.holding(dict(placed.tensors)) is placed
    assert PlacedTensors.holding(seen.tensors) is None
    seen.close()
    placed.close()


@pytest.mark.parametrize("nbytes", [0, 1 << 62], ids=["not to be mapped", "too large"])
def test_a_segment_that_cannot_be_made_leaves_no_descriptor(nbytes: int) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises((OSError, ValueError, OverflowError)):
        host_segments.make(nbytes)
    assert os.listdir("/proc/self/fd") == before


def test_a_segment_that_nobody_holds_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    host_segments.make(4096)
    assert os.listdir("/proc/self/fd") == before
