"""Which rank of the actor serves which rank of the rollout, and by which mover: made for each update, on the driver.

All ranks of the actor have every tensor in turn, since they are gathered by collectives. So on each node the first of
them serves the rollout's ranks of its node, through shared segments; ranks on nodes without the actor read from the
object store what the actor's rank 0 puts there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

__all__ = ["Metadata", "Reading", "Serving", "place", "routes"]


class Metadata(TypedDict):
    """What one rank says of itself: its place, and where its ring is reached (a rank of the actor)."""

    place: str
    address: str


@dataclass(frozen=True)
class Serving:
    """What a rank of the actor does: ``near`` and ``far`` are numbers of ranks of the rollout.

    ``board``: name of the actor that keeps what the far ones read.
    """

    rank: int
    near: tuple[int, ...] = ()
    far: tuple[int, ...] = ()
    board: str = ""


@dataclass(frozen=True)
class Reading:
    """What a rank of the rollout does: it reads from ``source``, at its ``address`` or from the ``board``."""

    rank: int
    source: int
    address: str = ""
    board: str = ""


def place() -> str:
    """What ranks have in common that reach each other's memory: a kernel, a network namespace, and a user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def routes(
    actor: Sequence[Metadata], rollout: Sequence[Metadata]
) -> tuple[tuple[Serving, ...], tuple[Reading, ...]]:
    """What each rank of either side does."""
    servers: dict[str, int] = {}
    for rank, said in enumerate(actor):
        servers.setdefault(said["place"], rank)
    far = tuple(rank for rank, said in enumerate(rollout) if said["place"] not in servers)
    board = f"phalanx-weights-{uuid.uuid4().hex}" if far else ""
    near = _by_server(rollout, servers)
    serving = tuple(
        Serving(rank, near.get(rank, ()), far if rank == 0 else (), board if rank == 0 else "")
        for rank in range(len(actor))
    )
    reading = tuple(
        Reading(rank, 0, board=board)
        if (server := servers.get(said["place"])) is None
        else Reading(rank, server, actor[server]["address"])
        for rank, said in enumerate(rollout)
    )
    return serving, reading


def _by_server(rollout: Sequence[Metadata], servers: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for rank, said in enumerate(rollout):
        server = servers.get(said["place"])
        if server is not None:
            found[server] = (*found.get(server, ()), rank)
    return found
