"""What `phalanx top` shows: runs, groups, and what each rank does now. Pure: values in, tables out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from phalanx.backends.backend_types import ProcessStatus
from phalanx.backends.ray.usage import Gpu, Usage
from phalanx.display.byte_format import size
from phalanx.display.registry_records import ChannelEntry, GroupRecord, RankRecord, RunRecord

_NAMES = {
    "__phalanx_run__": "run(...)",
    "__phalanx_host__": "a question of phalanx itself",
    "": "a call",
}
_STYLES = {"ready": "green", "starting": "yellow", "restarting": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class RankNow:
    """One rank: ``doing`` are method and seconds of each call that it is at, ``cpu`` percent of one core.

    ``use`` is percent of its accelerator, ``told`` what the rank says of itself; unknown things are None.
    """

    entry: RankRecord
    doing: tuple[tuple[str, float], ...] = ()
    note: str = ""
    memory: int | None = None
    cpu: float | None = None
    use: float | None = None
    told: str = ""


@dataclass(frozen=True)
class GroupNow:
    """One group and its ranks."""

    entry: GroupRecord
    ranks: tuple[RankNow, ...]


@dataclass(frozen=True)
class Overview:
    """All that runs on a cluster, at a Unix time."""

    address: str
    at: float
    runs: tuple[RunRecord, ...]
    groups: tuple[GroupNow, ...]
    channels: tuple[ChannelEntry, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        groups = [_group_data(group) for group in self.groups]
        runs = [
            {
                "run": run.run,
                "script": run.script,
                "pid": run.pid,
                "host": run.host,
                "started": run.started,
                "groups": [group for group in groups if group["run"] == run.run],
                "channels": [asdict(one) for one in self.channels if one.run == run.run],
            }
            for run in self.runs
        ]
        return {"address": self.address, "at": self.at, "runs": runs}


def rank_now(
    entry: RankRecord,
    sight: ProcessStatus,
    before: Usage | None,
    now: Usage | None,
    gpus: Sequence[Gpu] | None,
) -> RankNow:
    """What is known of a rank, from two looks at its process."""
    cpu = None
    if before is not None and now is not None and now.at > before.at:
        cpu = 100 * (now.cpu_s - before.cpu_s) / (now.at - before.at)
    return RankNow(
        entry=entry,
        doing=doing(sight),
        note="" if sight.reachable else sight.note,
        told=sight.told,
        memory=now.memory if now is not None else None,
        cpu=cpu,
        use=_use(entry, gpus or ()),
    )


def doing(sight: ProcessStatus) -> tuple[tuple[str, float], ...]:
    """The calls that a rank is at, the longest first."""
    calls = [
        (method_name(sight.methods.get(number, "")), seconds) for number, seconds in sight.running.items()
    ]
    return tuple(sorted(calls, key=lambda call: -call[1]))


def method_name(name: str) -> str:
    """A method as people know it; what the library asks a rank by itself is named too."""
    role, dot, method = name.rpartition(".")
    return role + dot + _NAMES.get(method, method)


def _use(entry: RankRecord, gpus: Sequence[Gpu]) -> float | None:
    own = set((entry.accelerator or "").split(","))
    uses = [gpu.use for gpu in gpus if (gpu.number in own or gpu.uuid in own) and gpu.use is not None]
    return max(uses) if uses else None


def _group_data(group: GroupNow) -> dict[str, Any]:
    entry = group.entry
    return {
        "run": entry.run,
        "name": entry.name,
        "state": entry.state,
        "epoch": entry.epoch,
        "pool": entry.pool,
        "roles": entry.roles,
        "cause": entry.cause,
        "weights": entry.weights,
        "ranks": [_rank_data(rank) for rank in group.ranks],
    }


def _rank_data(rank: RankNow) -> dict[str, Any]:
    entry = rank.entry
    return {
        "rank": entry.rank,
        "host": entry.host,
        "node_id": entry.node_id,
        "pid": entry.pid,
        "accelerator": entry.accelerator,
        "log": entry.log,
        "doing": [{"method": method, "seconds": seconds} for method, seconds in rank.doing],
        "note": rank.note,
        "told": rank.told,
        "memory_bytes": rank.memory,
        "cpu_percent": rank.cpu,
        "gpu_percent": rank.use,
    }


def render(overview: Overview, rows: int | None = None) -> Any:
    """Tables for a terminal; ``rows`` ranks of each group at most, the busiest first where some are left out."""
    if not overview.runs:
        return Text(f"no driver of Phalanx runs on the cluster at {overview.address}")
    parts: list[Any] = []
    for run in overview.runs:
        parts.append(_run_line(run, overview.at))
        own = [group for group in overview.groups if group.entry.run == run.run]
        parts += [_group_table(group, overview.at, rows) for group in own] or [Text("  no groups\n")]
        flows = [channel for channel in overview.channels if channel.run == run.run]
        parts += [_channel_table(flows, overview.at)] if flows else []
    return Group(*parts)


def _run_line(run: RunRecord, at: float) -> Any:
    up = duration(at - run.started)
    since = time.strftime("%H:%M", time.localtime(run.started))
    return Text.assemble(
        ("run ", "dim"), (run.run, "bold cyan"), f"  {run.script}", (f"  pid {run.pid} on {run.host}", "dim"),
        (f"  up {up}, since {since}\n", "dim"),
    )  # fmt: skip


def _group_table(group: GroupNow, at: float, rows: int | None) -> Any:
    entry = group.entry
    size = f"{_counted(len(group.ranks))} of {entry.label}, pool {entry.pool}"
    title = Text.assemble(
        (entry.name, "bold"), "  ", (entry.state, _STYLES.get(entry.state, "")),
        (f" for {duration(at - entry.changed)}, {size}", "dim"),
        (f", epoch {entry.epoch}" if entry.epoch else "", "dim"),
        ("".join(f", weights {name} {text}" for name, text in entry.weights.items()), "dim"),
    )  # fmt: skip
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, caption_justify="left", pad_edge=True
    )
    for name, justify in _COLUMNS.items():
        table.add_column(name, justify=justify, no_wrap=True)
    shown = _busiest(group.ranks, rows)
    with_gpu = any(rank.use is not None for rank in group.ranks)
    for rank in shown:
        table.add_row(*_cells(rank, with_gpu))
    notes = [_counted(len(group.ranks) - len(shown), "more ")] if len(shown) < len(group.ranks) else []
    if entry.cause and entry.state != "ready":
        notes.append(f"cause: {entry.cause}")
    table.caption = Text("\n".join(notes), style="dim")
    return table


def _channel_table(channels: Sequence[ChannelEntry], at: float) -> Any:
    table = Table(title=Text("channels", "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=True)
    for name in ("channel", "may wait", "waiting", "bytes", "oldest", "taken", "puts wait", "takes wait"):
        table.add_column(name, justify="left" if name in ("channel", "may wait") else "right", no_wrap=True)
    for name in ("items/s", "dropped", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in channels:
        age = "-" if one.oldest is None else duration(at - one.oldest)
        counts = (one.taken, one.puts, one.takes)
        lost = Text(str(one.lost), "red" if one.lost else "")
        table.add_row(
            one.name,
            one.limit,
            str(one.waiting),
            size(one.waiting_bytes),
            age,
            *map(str, counts),
            f"{one.per_second:.1f}",
            str(one.dropped),
            lost,
        )
    return table


_COLUMNS: Mapping[str, Any] = {
    "rank": "right",
    "host": "left",
    "pid": "right",
    "device": "left",
    "doing": "left",
    "memory": "right",
    "CPU": "right",
    "GPU": "right",
}


def _busiest(ranks: Sequence[RankNow], rows: int | None) -> list[RankNow]:
    if rows is None or len(ranks) <= rows:
        return list(ranks)
    longest = sorted(
        ranks, key=lambda rank: (-max([s for _, s in rank.doing], default=-1.0), rank.entry.rank)
    )
    return sorted(longest[:rows], key=lambda rank: rank.entry.rank)


def _cells(rank: RankNow, with_gpu: bool) -> tuple[Any, ...]:
    entry = rank.entry
    busy = ", ".join(f"{method} {duration(seconds)}" for method, seconds in rank.doing)
    what = Text(rank.note, "red") if rank.note else Text(busy, "cyan") if busy else Text("idle", "dim")
    if rank.told and not rank.note:
        what = Text.assemble(what, "\n", (rank.told, "dim"))
    return (
        str(entry.rank),
        entry.host,
        str(entry.pid),
        entry.accelerator or "-",
        what,
        size(rank.memory) if rank.memory is not None else "-",
        f"{rank.cpu:.0f}%" if rank.cpu is not None else "-",
        f"{rank.use:.0f}%" if rank.use is not None else "?" if with_gpu else "-",
    )


def _counted(ranks: int, which: str = "") -> str:
    return f"{ranks} {which}rank{'s' * (ranks != 1)}"


def duration(seconds: float) -> str:
    """Seconds as people say them: 0.4 s, 12 s, 3 min, 2 h 5 min."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
