"""Two sources and two targets as processes, and the movers between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from phalanx.weights.transport_interface import GLOO, SHARED_MEMORY
from tests.weights.transports import peers
from tests.weights.transports.peers import SOURCE, TARGET, Peer


class Sides:
    """Processes of both sides, with ends of one transport."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.sources = [Peer() for _ in range(SOURCE.ranks)]
        self.targets = [Peer() for _ in range(TARGET.ranks)]
        self._keys = itertools.count()
        self._host = Peer()
        self._store = self._host.do(peers.serve_store)

    @property
    def all(self) -> list[Peer]:
        return [*self.sources, *self.targets]

    def connect(self) -> None:
        """Make new ends, as after a change of epoch."""
        key = f"try {next(self._keys)}"
        order = peers.request(self.kind, key, self._store)
        addresses = {
            rank: peer.do(peers.connect, order, "source", rank) for rank, peer in enumerate(self.sources)
        }
        order = peers.request(self.kind, key, self._store, addresses)
        for rank, peer in enumerate(self.targets):
            peer.do(peers.connect, order, "target", rank)

    def replace(self, side: str, rank: int) -> None:
        """A new process in the place of one that died."""
        (self.sources if side == "source" else self.targets)[rank] = Peer()

    def close(self) -> None:
        for peer in [*self.all, self._host]:
            peer.kill()


@pytest.fixture(params=[SHARED_MEMORY, GLOO])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    made = Sides(request.param)
    try:
        made.connect()
        yield made
    finally:
        made.close()
