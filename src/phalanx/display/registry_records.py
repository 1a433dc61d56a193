"""Records that each driver publishes of its run, for others on the cluster to see: plain values, as JSON. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from phalanx.errors import PhalanxError
from phalanx.wire.messages import SideChannel

#: Beginning of the keys of handles on channels, "channel/<job>/<name>"; their bytes are read by other drivers only.
CHANNEL_PREFIX = "channel/"


@dataclass(frozen=True)
class RankRecord:
    """A rank of a group: where it runs, and where its output and its side channel are."""

    rank: int
    node_id: str
    host: str
    pid: int
    accelerator: str | None = None
    log: str | None = None
    side: SideChannel | None = None


@dataclass(frozen=True)
class GroupRecord:
    """A group. ``roles`` are classes by role, ``methods`` registered names by role; ``changed`` is a Unix time.

    ``weights`` has the version of the weights of each role, as text, by ``role.name``.
    """

    run: str
    number: int
    name: str
    state: str
    epoch: int
    pool: str
    changed: float
    label: str = ""
    roles: dict[str, str] = field(default_factory=dict[str, str])
    methods: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    detached: bool = False
    cause: str | None = None
    ranks: tuple[RankRecord, ...] = ()
    weights: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def key(self) -> str:
        """The key under which it is published."""
        return f"group/{self.run}/{self.number}"

    @property
    def full_name(self) -> str:
        """Its run and its name."""
        return f"{self.run}/{self.name}"


@dataclass(frozen=True)
class RunRecord:
    """A driver. ``started`` is a Unix time; ``job`` is the backend's id of it."""

    run: str
    job: str
    pid: int
    host: str
    started: float
    script: str
    version: str

    @property
    def key(self) -> str:
        """The key under which it is published."""
        return f"run/{self.run}"


@dataclass(frozen=True)
class ChannelEntry:
    """A channel, as its owner saw it at ``changed``. That and ``oldest``, of the waiting items, are Unix times."""

    run: str
    name: str
    limit: str
    waiting: int
    waiting_bytes: int
    taken: int
    puts: int
    takes: int
    delivered: int
    dropped: int
    lost: int
    per_second: float
    changed: float
    oldest: float | None = None

    @property
    def key(self) -> str:
        """The key under which it is published."""
        return f"flow/{self.run}/{self.name}"


def to_bytes(record: RunRecord | GroupRecord | ChannelEntry) -> bytes:
    """Return a record as it is published."""
    return json.dumps(asdict(record)).encode()


@dataclass(frozen=True)
class ClusterRegistry:
    """All records of a cluster; ``handles`` are the keys of handles on channels."""

    runs: tuple[RunRecord, ...]
    groups: tuple[GroupRecord, ...]
    channels: tuple[ChannelEntry, ...] = ()
    handles: tuple[str, ...] = ()

    def groups_of(self, run: str) -> tuple[GroupRecord, ...]:
        """Return the groups of a run, in the order in which they were made."""
        return tuple(group for group in self.groups if group.run == run)

    def stale(self, alive_jobs: Iterable[str], alive_names: Iterable[str]) -> list[str]:
        """Return the keys of records that dead drivers have left.

        A detached group outlives its driver for as long as a process named ``<group>:0`` is there.
        """
        jobs, names = set(alive_jobs), set(alive_names)
        alive = {run.run for run in self.runs if run.job in jobs}
        lost = [
            group
            for group in self.groups
            if group.run not in alive and not (group.detached and f"{group.name}:0" in names)
        ]
        kept = alive | {group.run for group in self.groups if group not in lost}
        runs = [run.key for run in self.runs if run.run not in kept]
        channels = [channel.key for channel in self.channels if channel.run not in alive]
        handles = [key for key in self.handles if key.split("/")[1] not in jobs]
        return [*(group.key for group in lost), *runs, *channels, *handles]

    def find(self, text: str) -> GroupRecord:
        """Return the group of that name, or the only group whose name begins, or else ends like this.

        ``<run>/<name>`` if names repeat. Groups of verl have a random beginning before the name of their class.

        Raises:
            NoSuchGroup: if there is none, or several; with a list of the existing groups.
        """
        named = [group for group in self.groups if text in (group.name, group.full_name)]
        if not named:
            named = [g for g in self.groups if g.name.startswith(text) or g.full_name.startswith(text)]
        if not named:
            named = [group for group in self.groups if group.name.endswith(text)]
        if len(named) == 1:
            return named[0]
        there = ", ".join(sorted(group.full_name for group in named or self.groups))
        if named:
            raise NoSuchGroup(f"{text!r} could be any of {there}: give more of the name, or <run>/<name>")
        reason = f"; there are: {there}" if there else ": no driver on this cluster has one"
        raise NoSuchGroup(f"there is no group {text!r}{reason}")


class NoSuchGroup(PhalanxError):
    """No published group has the name that was given, or several have."""


def read_notices(entries: Mapping[str, bytes]) -> ClusterRegistry:
    """Return the records by their keys; records in the format of another version are left out."""
    runs: list[RunRecord] = []
    groups: list[GroupRecord] = []
    channels: list[ChannelEntry] = []
    for key, data in sorted(entries.items()):
        with contextlib.suppress(TypeError, ValueError, KeyError):
            kind = key.partition("/")[0]
            if kind == "run":
                runs.append(RunRecord(**json.loads(data)))
            elif kind == "group":
                value = json.loads(data)
                for rank in value["ranks"]:
                    rank["side"] = SideChannel(*rank["side"]) if rank["side"] else None
                groups.append(
                    GroupRecord(**value | {"ranks": tuple(RankRecord(**r) for r in value["ranks"])})
                )
            elif kind == "flow":
                channels.append(ChannelEntry(**json.loads(data)))
    return ClusterRegistry(
        tuple(sorted(runs, key=lambda run: run.started)),
        tuple(sorted(groups, key=lambda group: (group.run, group.number))),
        tuple(sorted(channels, key=lambda channel: (channel.run, channel.name))),
        tuple(key for key in sorted(entries) if key.startswith(CHANNEL_PREFIX)),
    )
