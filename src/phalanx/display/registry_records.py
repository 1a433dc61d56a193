"""Records of the cluster registry, which each driver publishes about its run: plain values, as JSON. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.wire.messages import SideChannel

#: Prefix of the keys of channel handles, "channel/<job>/<name>", whose values only other drivers read.
CHANNEL_PREFIX = "channel/"


@dataclass(frozen=True)
class RankRecord:
    """A rank of a group: its process, the file of its output, and its side channel."""

    rank: int
    node_id: str
    host: str
    pid: int
    accelerator: str | None = None
    log: str | None = None
    side: SideChannel | None = None


@dataclass(frozen=True)
class GroupRecord:
    """A group. ``roles`` are classes by role, ``methods`` names of registered methods by role.

    ``changed`` is the Unix time of the last change of state. ``weights`` are versions of weights as text, by
    ``role.name``.
    """

    run: str
    number: int
    name: str
    state: str
    epoch: int
    pool: str
    changed: float
    label: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    methods: dict[str, list[str]] = field(default_factory=dict)
    detached: bool = False
    cause: str | None = None
    ranks: tuple[RankRecord, ...] = ()
    weights: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Key under which the record is published."""
        return f"group/{self.run}/{self.number}"

    @property
    def full_name(self) -> str:
        """The group's run and name, ``<run>/<name>``."""
        return f"{self.run}/{self.name}"


@dataclass(frozen=True)
class RunRecord:
    """A run, by its driver. ``started`` is a Unix time; ``job`` is the backend's id of the driver.

    ``ended`` is set by the reader: a run with a detached group outlives its driver.
    """

    run: str
    job: str
    pid: int
    host: str
    started: float
    script: str
    ended: bool = False

    @property
    def key(self) -> str:
        """Key under which the record is published."""
        return f"run/{self.run}"


@dataclass(frozen=True)
class ChannelRecord:
    """State of a channel at ``changed``. ``changed`` and ``oldest``, of the oldest waiting item, are Unix times."""

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
        """Key under which the record is published."""
        return f"flow/{self.run}/{self.name}"


def to_bytes(record: RunRecord | GroupRecord | ChannelRecord) -> bytes:
    """Return a record in its published form."""
    return json.dumps(asdict(record)).encode()


@dataclass(frozen=True)
class ClusterRegistry:
    """All records of a cluster; ``handles`` are the keys of channel handles."""

    runs: tuple[RunRecord, ...]
    groups: tuple[GroupRecord, ...]
    channels: tuple[ChannelRecord, ...] = ()
    handles: tuple[str, ...] = ()

    def stale(self, alive_jobs: Iterable[str], alive_names: Iterable[str]) -> list[str]:
        """Return the keys of the records of dead drivers.

        A detached group outlives its driver while a process named ``<group>:0`` exists.
        """
        jobs, names = set(alive_jobs), set(alive_names)
        alive = {run.run for run in self.runs if run.job in jobs}
        detached = {group.key for group in self.groups if group.detached and f"{group.name}:0" in names}
        lost = [group.key for group in self.groups if group.run not in alive and group.key not in detached]
        kept = alive | {group.run for group in self.groups if group.key in detached}
        lost += [run.key for run in self.runs if run.run not in kept]
        lost += [channel.key for channel in self.channels if channel.run not in alive]
        return lost + [key for key in self.handles if key.split("/")[1] not in jobs]

    def find(self, text: str) -> GroupRecord:
        """Return the group named ``text``, else the only group whose name begins with it, else ends with it.

        ``text`` may be ``<run>/<name>``, if names repeat; if they repeat in a run, the newest group is returned. Names
        of verl's groups are a random prefix and a class.

        Raises:
            NoSuchGroup: if no group or several groups match; the message lists the groups.
        """
        named = [group for group in self.groups if text in (group.name, group.full_name)]
        named = named or [g for g in self.groups if g.name.startswith(text) or g.full_name.startswith(text)]
        named = named or [group for group in self.groups if group.name.endswith(text)]
        if len({group.full_name for group in named}) == 1:
            return named[-1]
        there = ", ".join(sorted(group.full_name for group in named or self.groups))
        if named:
            raise NoSuchGroup(f"{text!r} could be any of {there}: give more of the name, or <run>/<name>")
        reason = f"; existing groups: {there}" if there else ": no driver on this cluster has one"
        raise NoSuchGroup(f"there is no group {text!r}{reason}")


class NoSuchGroup(PhalanxError):
    """No published group has the given name, or several have it."""


def read_registry(entries: Mapping[str, bytes]) -> ClusterRegistry:
    """Return the records in registry entries by key; records in the format of another version are left out."""
    read: dict[str, list[Any]] = {kind: [] for kind in _MADE}
    for key, data in sorted(entries.items()):
        kind = key.partition("/")[0]
        with contextlib.suppress(TypeError, ValueError, KeyError):
            read[kind].append(_MADE[kind](**json.loads(data)))
    runs = sorted(read["run"], key=lambda run: run.started)
    groups = sorted(read["group"], key=lambda group: (group.run, group.number))
    handles = tuple(key for key in sorted(entries) if key.startswith(CHANNEL_PREFIX))
    return ClusterRegistry(tuple(runs), tuple(groups), tuple(read["flow"]), handles)


def _rank(side: list[Any] | None, **values: Any) -> RankRecord:
    return RankRecord(**values, side=None if side is None else SideChannel(*side))


def _group(ranks: list[dict[str, Any]], **values: Any) -> GroupRecord:
    return GroupRecord(**values, ranks=tuple(_rank(**rank) for rank in ranks))


_MADE = {"run": RunRecord, "group": _group, "flow": ChannelRecord}
