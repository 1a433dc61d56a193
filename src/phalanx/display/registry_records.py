"""What each driver publishes of its run, for others on the cluster to see: plain values, as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.wire.messages import SideChannel

RUN_PREFIX = "run/"
GROUP_PREFIX = "group/"
FLOW_PREFIX = "flow/"
CHANNEL_PREFIX = "channel/"
"""Of what a handle on a channel is made from: "channel/<job>/<name>"; bytes that only other drivers read."""


@dataclass(frozen=True)
class RankRecord:
    """One rank of a group: where it runs, and where its output and its side channel are."""

    rank: int
    node_id: str
    host: str
    pid: int
    accelerator: str | None = None
    log: str | None = None
    side: SideChannel | None = None


@dataclass(frozen=True)
class GroupRecord:
    """One group. ``roles`` are classes by role, ``methods`` registered names by role; ``changed`` is a Unix time.

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
        """Where it is published."""
        return f"{GROUP_PREFIX}{self.run}/{self.number}"


@dataclass(frozen=True)
class RunRecord:
    """One driver. ``started`` is a Unix time; ``job`` is the backend's id of it."""

    run: str
    job: str
    pid: int
    host: str
    started: float
    script: str
    version: str

    @property
    def key(self) -> str:
        """Where it is published."""
        return f"{RUN_PREFIX}{self.run}"


@dataclass(frozen=True)
class ChannelEntry:
    """One channel, as its owner saw it at ``changed``. That and ``oldest``, of what waits, are Unix times."""

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
        """Where it is published."""
        return f"{FLOW_PREFIX}{self.run}/{self.name}"


def to_bytes(entry: RunRecord | GroupRecord | ChannelEntry) -> bytes:
    """An entry as it is published."""
    return json.dumps(asdict(entry)).encode()


@dataclass(frozen=True)
class ClusterRegistry:
    """All entries of a cluster."""

    runs: tuple[RunRecord, ...]
    groups: tuple[GroupRecord, ...]
    channels: tuple[ChannelEntry, ...] = ()
    handles: tuple[str, ...] = ()
    """Keys of what handles on channels are made from."""

    def groups_of(self, run: str) -> tuple[GroupRecord, ...]:
        """The groups of a run, in the order in which they were made."""
        return tuple(group for group in self.groups if group.run == run)

    def stale(self, alive_jobs: Iterable[str], alive_names: Iterable[str]) -> list[str]:
        """Keys of what dead drivers have left.

        A detached group outlives its driver for as long as a process named ``<group>:0`` is there.
        """
        jobs, names = set(alive_jobs), set(alive_names)
        dead = {run.run for run in self.runs if run.job not in jobs}
        known = {run.run for run in self.runs}
        gone = [
            group
            for group in self.groups
            if (group.run in dead or group.run not in known)
            and not (group.detached and f"{group.name}:0" in names)
        ]
        left = {group.run for group in self.groups if group not in gone}
        empty = [run for run in self.runs if run.run in dead and run.run not in left]
        flows = [flow.key for flow in self.channels if flow.run in dead or flow.run not in known]
        handles = [key for key in self.handles if key.split("/")[1] not in jobs]
        return [*(entry.key for entry in (*gone, *empty)), *flows, *handles]

    def without(self, keys: Iterable[str]) -> ClusterRegistry:
        """The same without some entries."""
        out = set(keys)
        return ClusterRegistry(
            tuple(run for run in self.runs if run.key not in out),
            tuple(group for group in self.groups if group.key not in out),
            tuple(channel for channel in self.channels if channel.key not in out),
            tuple(key for key in self.handles if key not in out),
        )

    def find(self, text: str) -> GroupRecord:
        """The group of that name, or the only one whose name begins, or else ends like this.

        ``<run>/<name>`` where names repeat. Groups of verl's have a random beginning before the name of their class.

        Raises:
            NoSuchGroup: there is none, or several; with a list of those that there are.
        """
        named = [group for group in self.groups if text in (group.name, _full(group))]
        if not named:
            named = [g for g in self.groups if g.name.startswith(text) or _full(g).startswith(text)]
        if not named:
            named = [group for group in self.groups if group.name.endswith(text)]
        if len(named) == 1:
            return named[0]
        there = ", ".join(sorted(map(_full, named or self.groups)))
        if named:
            raise NoSuchGroup(f"{text!r} could be any of {there}: give more of the name, or <run>/<name>")
        raise NoSuchGroup(
            f"there is no group {text!r}; there are: {there}"
            if there
            else f"there is no group {text!r}: no driver on this cluster has one"
        )


class NoSuchGroup(PhalanxError):
    """No published group has the name that was given, or several have."""


def read_notices(entries: Mapping[str, bytes]) -> ClusterRegistry:
    """The entries behind their keys; what another version wrote otherwise is left out."""
    runs: list[RunRecord] = []
    groups: list[GroupRecord] = []
    channels: list[ChannelEntry] = []
    handles: list[str] = []
    for key, data in sorted(entries.items()):
        if key.startswith(CHANNEL_PREFIX):
            handles.append(key)
            continue
        try:
            value = json.loads(data)
            if key.startswith(RUN_PREFIX):
                runs.append(RunRecord(**value))
            elif key.startswith(GROUP_PREFIX):
                groups.append(_group(value))
            elif key.startswith(FLOW_PREFIX):
                channels.append(ChannelEntry(**value))
        except (TypeError, ValueError, KeyError):
            continue
    return ClusterRegistry(
        tuple(sorted(runs, key=lambda run: run.started)),
        tuple(sorted(groups, key=lambda group: (group.run, group.number))),
        tuple(sorted(channels, key=lambda channel: (channel.run, channel.name))),
        tuple(handles),
    )


def _group(value: dict[str, Any]) -> GroupRecord:
    ranks: Sequence[dict[str, Any]] = value.pop("ranks")
    return GroupRecord(**value, ranks=tuple(map(_rank, ranks)))


def _rank(value: dict[str, Any]) -> RankRecord:
    side = value.pop("side")
    return RankRecord(**value, side=SideChannel(*side) if side else None)


def _full(group: GroupRecord) -> str:
    return f"{group.run}/{group.name}"
