"""Every transport between processes: weights arrive, and the other ranks notice the death of a peer at once."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import numpy as np
import pytest

from phalanx.errors import WeightsTransferError
from tests.weights.planning.layouts import locals_of
from tests.weights.transports import peers
from tests.weights.transports.conftest import Sides
from tests.weights.transports.peers import TARGET, Peer, weights


def begin(sides: Sides, version: int, timeout: float = 20.0) -> None:
    for rank, peer in enumerate(sides.sources):
        peer.begin(peers.send, rank, version, timeout)
    for rank, peer in enumerate(sides.targets):
        peer.begin(peers.receive, rank, timeout)


def has(found: Any, rank: int, version: int) -> bool:
    wanted = locals_of(TARGET, weights(version))[rank]
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], one.numpy()) for name, one in wanted.items()
    )


def sync(sides: Sides, version: int) -> bool:
    """Whether a sync brought the version to all targets."""
    begin(sides, version)
    for peer in sides.sources:
        peer.result()
    return all(has(peer.result(), rank, version) for rank, peer in enumerate(sides.targets))


def fails(peer: Peer, within: float) -> WeightsTransferError:
    """The error of what a peer is doing, which must come so soon."""
    with pytest.raises(WeightsTransferError) as raised:
        peer.result(within)
    return raised.value


def test_weights_arrive_bit_for_bit_sync_after_sync(sides: Sides) -> None:
    assert all(sync(sides, version) for version in (1, 2, 3))


def test_a_target_that_dies_in_the_middle_is_known_to_its_sources_at_once(sides: Sides) -> None:
    sides.sources[0].begin(peers.send, 0, 1, 60.0)
    sides.sources[1].begin(peers.send, 1, 1, 60.0)
    sides.targets[0].begin(peers.receive, 0, 60.0, 5)
    sides.targets[1].begin(peers.receive, 1, 60.0)
    sides.targets[0].process.join()

    errors = [fails(peer, 4.0) for peer in sides.sources]

    assert "target rank 0" in [error.peer for error in errors]


def test_a_source_that_dies_in_the_middle_is_known_to_its_targets_at_once(sides: Sides) -> None:
    sides.sources[0].begin(peers.send, 0, 1, 60.0, 5)
    sides.sources[1].begin(peers.send, 1, 1, 60.0)
    for rank, peer in enumerate(sides.targets):
        peer.begin(peers.receive, rank, 60.0)
    sides.sources[0].process.join()

    errors = [fails(peer, 4.0) for peer in sides.targets]

    assert "source rank 0" in [error.peer for error in errors]


def test_after_a_death_new_ends_bring_the_weights(sides: Sides) -> None:
    sides.sources[0].begin(peers.send, 0, 1, 60.0, 5)
    sides.sources[1].begin(peers.send, 1, 1, 60.0)
    for rank, peer in enumerate(sides.targets):
        peer.begin(peers.receive, rank, 60.0)
    for peer in sides.targets:
        fails(peer, 5.0)
    with contextlib.suppress(WeightsTransferError):  # its targets may have had all of it before they knew
        sides.sources[1].result(5.0)
    sides.replace("source", 0)
    sides.connect()

    assert sync(sides, 2)


def test_a_peer_that_does_not_come_is_named_when_the_time_is_over(sides: Sides) -> None:
    sides.targets[0].begin(peers.receive, 0, 0.3)

    assert fails(sides.targets[0], 5.0).peer in ("source rank 0", "source rank 1")


def test_a_target_that_stands_still_does_not_hold_its_sources_for_ever(sides: Sides) -> None:
    for rank, peer in enumerate(sides.sources):
        peer.begin(peers.send, rank, 1, 1.0)
    sides.targets[0].begin(peers.receive, 0, 60.0, 5, signal.SIGSTOP)
    sides.targets[1].begin(peers.receive, 1, 60.0)

    assert [fails(peer, 5.0).peer for peer in sides.sources].count("target rank 0") >= 1


def test_a_slow_reader_is_waited_for(sides: Sides) -> None:
    for rank, peer in enumerate(sides.sources):
        peer.begin(peers.send, rank, 1, 30.0)
    sides.targets[0].begin(peers.receive, 0, 30.0)
    with pytest.raises(TimeoutError):
        sides.targets[0].result(2.5)
    sides.targets[1].begin(peers.receive, 1, 30.0)

    assert all(has(peer.result(), rank, 1) for rank, peer in enumerate(sides.targets))
