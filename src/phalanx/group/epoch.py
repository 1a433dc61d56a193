"""The membership of a group: its description in handles, the processes of an epoch, and their snapshot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from phalanx.backends.backend_types import Backend, Endpoint
from phalanx.declare.register import MethodSpec
from phalanx.display.text_format import size
from phalanx.topology.mesh import Mesh


@dataclass(frozen=True)
class GroupHandle:
    """Description of a group for its views in other processes; serialized with the group's handles."""

    name: str
    number: int
    methods: dict[str, dict[str, MethodSpec]]
    callables: dict[str, frozenset[str]]
    classes: dict[str, str]
    meshes: dict[str, Mesh] = field(default_factory=dict)
    call_timeout: float | None = None
    stall_report_after: float | None = None
    pool: str = ""
    detached: bool = False
    asynchronous: bool = False
    independent: bool = False

    @property
    def label(self) -> str:
        """Label of each rank's process: the roles, or the only class."""
        return "+".join(role or name for role, name in self.classes.items())


@dataclass(eq=False, slots=True)
class Epoch:
    """The roster of a group between two changes of its members.

    Only the first ``size`` ranks get calls. Further ranks are new ranks of a growing group, which get their weights
    first (``joining``), or leaving ranks of a shrinking group, which finish their calls.

    Attributes:
        endpoints: the process of each rank. They never change: a group with other processes is in another epoch. Empty
            while processes are started.
        stay: while ``endpoints`` is empty, the processes that will stay, by rank.
        stopped: ranks that were stopped on purpose.
        meshes: declared meshes in use, and meshes that its ranks reported.
        everyone: the ranks below ``size``.
        nodes: the node of each rank below ``size``.
    """

    number: int
    size: int
    endpoints: tuple[Endpoint, ...] = ()
    joining: bool = False
    stay: Sequence[Endpoint | None] = ()
    stopped: set[int] = field(default_factory=set)
    meshes: dict[str, Mesh] = field(default_factory=dict)
    everyone: tuple[int, ...] = field(init=False)
    nodes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.everyone = tuple(range(self.size))
        self.nodes = tuple(endpoint.facts.slot.node_id for endpoint in self.endpoints[: self.size])

    def has_kept(self, ranks: Sequence[int], since: Epoch) -> bool:
        """Return whether these ranks have the processes of an earlier epoch, or left after finishing their calls."""
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
        there = min(self.size, len(mine), len(theirs))  # 0 while the group restarts
        return all(rank < there and mine[rank] is theirs[rank] for rank in ranks)

    @property
    def reached(self) -> tuple[int, ...]:
        """The ranks that weights are sent to, including joining ranks, which need weights before calls."""
        return tuple(range(len(self.endpoints))) if self.joining else self.everyone

    def dead(self, backend: Backend) -> list[int]:
        """Return the ranks below ``size`` that are known to be dead; cheap."""
        return backend.dead_of(self.endpoints[: self.size])


@dataclass(frozen=True)
class Snapshot:
    """Result of ``px.snapshot``.

    Attributes:
        number: counts the snapshots of the group, from 1.
        holders: by rank, the rank whose process has a second copy of its state; itself if there is no other rank.
        nbytes: bytes of the state of all ranks, each counted once.
        sent_bytes: bytes sent to the holders this time; unchanged tensors are not sent again.
        seconds: duration of the snapshot, for which calls of the group waited.
    """

    number: int
    holders: tuple[int, ...]
    nbytes: int
    sent_bytes: int
    seconds: float

    def without(self, gone: Collection[int]) -> Snapshot:
        """Return the snapshot after ``gone`` ranks were lost with the copies that they held for others."""
        held_by = (rank if holder in gone else holder for rank, holder in enumerate(self.holders))
        return replace(self, holders=tuple(held_by))

    def __str__(self) -> str:
        return (
            f"snapshot {self.number}: {size(self.nbytes)}, {size(self.sent_bytes)} sent, {self.seconds:.2f} s"
        )
