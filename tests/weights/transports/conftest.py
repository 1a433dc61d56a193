"""Two sources and two targets as processes, and the movers between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.weights.transports import peers
from tests.weights.transports.peers import SOURCE, TARGET, Peer

_ENDS = {
    "ring": (peers.ring_source, peers.ring_target),
    "placed": (peers.placed_source, peers.placed_target),
}


class Sides:
    """Processes of both sides, with ends of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.sources = [Peer() for _ in range(SOURCE.ranks)]
        self.targets = [Peer() for _ in range(TARGET.ranks)]
        self._prefixes = itertools.count()
        self._host = Peer() if kind == "process group" else None
        if self._host is not None:
            for peer in self.all:
                peer.do(peers.set_by_readers)

    @property
    def all(self) -> list[Peer]:
        return [*self.sources, *self.targets]

    def connect(self) -> None:
        """New ends, as after a change of epoch."""
        if self._host is None:
            source, target = _ENDS[self.kind]
            addresses = [peer.do(source, rank) for rank, peer in enumerate(self.sources)]
            for rank, peer in enumerate(self.targets):
                peer.do(target, rank, addresses)
            return
        port, prefix = self._host.do(peers.serve_store), f"try {next(self._prefixes)}"
        for side, ranks in (("source", self.sources), ("target", self.targets)):
            for rank, peer in enumerate(ranks):
                peer.begin(peers.group_end, port, prefix, side, rank)
        for peer in self.all:
            peer.result()

    def replace(self, side: str, rank: int) -> None:
        """A new process in the place of one that died."""
        peer = Peer()
        (self.sources if side == "source" else self.targets)[rank] = peer
        if self._host is not None:
            peer.do(peers.set_by_readers)

    def close(self) -> None:
        for peer in [*self.all, *([self._host] if self._host else [])]:
            peer.kill()


@pytest.fixture(params=["ring", "process group"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    made = Sides(request.param)
    try:
        made.connect()
        yield made
    finally:
        made.close()


@pytest.fixture
def placed_sides() -> Iterator[Sides]:
    made = Sides("placed")
    try:
        made.connect()
        yield made
    finally:
        made.close()


@pytest.fixture
def ring_sides() -> Iterator[Sides]:
    made = Sides("ring")
    try:
        made.connect()
        yield made
    finally:
        made.close()
