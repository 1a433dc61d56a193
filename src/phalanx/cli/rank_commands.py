"""`phalanx stack GROUP` and `phalanx logs GROUP`: stacks and output of the ranks of a group, without stopping them."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.common import Address, AsJson, GroupName, cluster_reader, duration, rank_status, show
from phalanx.collect.message import rank_list
from phalanx.display.log_merging import Lines, prefix_of
from phalanx.display.registry_records import GroupRecord, RankRecord
from phalanx.errors import DispatchError

if TYPE_CHECKING:
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

_POLL_S = 0.2

Ranks = Annotated[list[int] | None, typer.Option("--rank", "-r", help="Only this rank; repeatable.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new output.")]
Tail = Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines of each rank.")]


@contextlib.contextmanager
def observed_ranks(
    address: str | None, name: str, numbers: Sequence[int] | None
) -> Generator[tuple[RankObserver, GroupRecord, tuple[RankRecord, ...]]]:
    """Yield an observer of ranks, the group called ``name``, and its ranks ``numbers`` (default: all).

    Raises:
        PlacementError: if there is no cluster.
        NoSuchGroup: if there is no such group.
        DispatchError: if the group has no such rank.
    """
    from phalanx.backends.ray.node_agents import RankObserver  # loads Ray

    cluster = cluster_reader(address)
    group = cluster.registry().find(name)
    missing = sorted(set(numbers or ()) - {entry.rank for entry in group.ranks})
    if missing:
        raise DispatchError(
            f"group {group.name!r}, {group.state}, has no rank {missing[0]}: it has {len(group.ranks)} ranks now"
        )
    with contextlib.closing(RankObserver(cluster.address)) as observer:
        yield observer, group, tuple(entry for entry in group.ranks if not numbers or entry.rank in numbers)


def stack(group: GroupName, rank: Ranks = None, address: Address = None, as_json: AsJson = False) -> None:
    """Print the current stack of each rank of a group, even inside native code or a collective.

    Ranks with equal stacks are shown together.

    Examples:

      phalanx stack trainer

      phalanx stack trainer --rank 3 --rank 7

    Exit codes: 0 done; 2 no cluster, no such group or no such rank.
    """
    with observed_ranks(address, group, rank) as (observer, found, ranks):
        statuses = observer.inspect(ranks, stacks=True)
    data = list(map(rank_status, ranks, statuses))
    places = [f"\n{members}\n{text}" for members, text in by_place(data)]
    show(as_json, data, "\n".join([f"group {found.name}, {found.state}, epoch {found.epoch}", *places]))


def by_place(ranks: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of ranks with their calls, and stack. Ranks with equal stacks and calls are grouped."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for rank in ranks:
        lines = rank["stack"] or rank["note"].splitlines() or ["no stack"]
        methods = ", ".join(call["method"] for call in rank["doing"])
        together.setdefault((tuple(lines), methods, rank["reachable"]), []).append(rank)
    shown: list[tuple[str, str]] = []
    for (lines, methods, reachable), members in together.items():
        hosts = {rank["host"] for rank in members}
        where = f"host {members[0]['host']}" if len(hosts) == 1 else f"{len(hosts)} hosts"
        where += f", pid {members[0]['pid']}" if len(members) == 1 else ""
        state = "idle" if reachable else "cannot be reached"
        if methods:
            state = f"at {methods} for {duration(max(rank['doing'][0]['seconds'] for rank in members))}"
        head = f"{rank_list(rank['rank'] for rank in members)} ({where}): {state}"
        shown.append((head, "\n".join(f"  {line}" for line in lines)))
    return shown


def logs(
    group: GroupName,
    rank: Ranks = None,
    follow: Follow = False,
    tail: Tail = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of the ranks of a group: of Python, of native libraries and of child processes.

    Each line has its rank's prefix, such as \\[actor r3@host]. Equal lines of many ranks are not merged.
    After a restart, run --follow again: it prints the output of the processes that it found.

    Examples:

      phalanx logs trainer --rank 0 --tail 50

      phalanx logs trainer --follow

    Exit codes: 0 done; 2 no cluster, no such group or rank, or a file cannot be read.
    """
    with observed_ranks(address, group, rank) as (observer, found, ranks):
        try:
            files = [(entry, Lines(partial(observer.read, entry))) for entry in ranks]
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    for entry, file in files:
                        for text in deque(file.new(last=not follow), maxlen=tail):
                            line = prefix_of(found.label, [entry.rank], [entry.host]) + text
                            typer.echo(json.dumps({"rank": entry.rank, "text": text}) if as_json else line)
                    if not follow:
                        break
                    time.sleep(_POLL_S)
                    tail = None  # only existing output is cut
        except BrokenPipeError:
            raise  # the reader of the output ended
        except OSError as error:
            raise DispatchError(f"group {found.name!r}: {error}") from None
