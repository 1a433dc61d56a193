"""The membership of a group: the data that is serialized with its handles, and the processes of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.backends.backend_types import Backend, Endpoint
from phalanx.declare.spec import MethodSpec
from phalanx.topology.mesh import Mesh


@dataclass(frozen=True)
class GroupCard:
    """Facts that a view of a group in another process needs; travels with the group's handles."""

    name: str
    number: int
    methods: dict[str, dict[str, MethodSpec]]
    callables: dict[str, frozenset[str]]
    classes: dict[str, str]
    meshes: dict[str, Mesh] = field(default_factory=dict[str, Mesh])
    call_timeout: float | None = None
    stall_report_after: float | None = None
    pool: str = ""
    detached: bool = False
    asynchronous: bool = False
    independent: bool = False


class Epoch:
    """The roster of a group from a change of its members to the next.

    An endpoint is an *incarnation* of its rank: the process that is the rank until another process takes over. The
    endpoints never change; a group replaces its epoch as a whole. ``endpoints`` is empty while the processes are
    started.

    Behind the ``size`` ranks that calls go to there may be others: new ranks of a growing group, which are ``joining``
    and get their weights, or leaving ranks of a shrinking group, which finish their calls.
    """

    __slots__ = ("endpoints", "everyone", "joining", "meshes", "nodes", "number", "size", "stay", "stopped")

    def __init__(
        self,
        number: int,
        size: int,
        endpoints: Sequence[Endpoint] = (),
        *,
        joining: bool = False,
        stay: Sequence[Endpoint | None] = (),
    ) -> None:
        self.number = number
        self.size = size
        self.joining = joining
        self.everyone = tuple(range(size))
        self.endpoints = tuple(endpoints)
        self.stay = stay  # of an epoch without endpoints: processes that will stay, by rank
        self.nodes = tuple(endpoint.facts.slot.node_id for endpoint in endpoints)  # by rank
        self.meshes: dict[str, Mesh] = {}  # reported by its ranks
        self.stopped: set[int] = set()  # ranks that were stopped on purpose

    def has_kept(self, ranks: Sequence[int], since: Epoch) -> bool:
        """Return whether these ranks are still the processes that they were in an earlier epoch."""
        if self is since:
            return True
        mine, theirs = self.endpoints or self.stay, since.endpoints
        return all(
            rank < len(theirs) and (theirs[rank].retired or (rank < len(mine) and mine[rank] is theirs[rank]))
            for rank in ranks
        )

    def takes(self, ranks: Sequence[int], since: Epoch) -> bool:
        """Return whether a call made for these ranks in an earlier epoch can still be sent to them."""
        mine, theirs = self.endpoints, since.endpoints
        there = min(self.size, len(mine), len(theirs))  # none of them are while the group restarts
        return all(rank < there and mine[rank] is theirs[rank] for rank in ranks)

    @property
    def reached(self) -> tuple[int, ...]:
        """The ranks that weights go to: joining ranks need them before they get calls."""
        return tuple(range(len(self.endpoints))) if self.joining else self.everyone

    def dead(self, backend: Backend) -> list[int]:
        """Return the called ranks that are known to be dead; cheap."""
        return backend.dead_of(self.endpoints[: self.size])
