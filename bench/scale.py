"""What a call to many ranks costs, through relays and without: `python bench/scale.py --ranks 16 64 --objects 1024`.

Each way is measured once what Ray does after calls of the other one is over. `net` is without what the driver's threads
take while nobody calls, which is measured beside. With `--objects` the ranks are objects in the relays' processes, 32
in each: what the driver does, messages and hops are those of that many processes. `make bench ARGS="--only scale"` runs
all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # what relays run is found there

import phalanx as px  # noqa: E402
from bench.accounts import thread_seconds  # noqa: E402
from bench.hosted import Counted, HostedTransport, Light  # noqa: E402

ROUNDS, CALLS = 5, 20
SETTLES_S = 2.5  # in the second after a call of each rank Ray tells the cluster of these tasks, one by one
IDLE_S = 4.0
RELAYS, DIRECT = "relays", "direct"


@dataclass
class Taken:
    """Seconds of one call, by repetition: by the clock, of this process's CPU, and of others' by what they are."""

    clock: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    others: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def measure(self, call: Callable[[], Any], processes: dict[str, Sequence[int]], keep: bool) -> None:
        """Make some calls, and note the mean of one."""
        used = {name: thread_seconds(pids) for name, pids in processes.items()}
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(CALLS):
            call()
        clock, cpu = time.perf_counter() - began, time.process_time() - cpu
        if keep:
            self.clock.append(clock / CALLS)
            self.cpu.append(cpu / CALLS)
            for name, pids in processes.items():
                spent = (thread_seconds(pids) - used[name]) / CALLS
                self.others.setdefault(name, []).append(spent)

    def told(self, idle: float) -> dict[str, Any]:
        """For a line of JSON; ``idle`` is the CPU that the driver takes in a second without calls."""
        net = [max(0.0, cpu - idle * clock) for cpu, clock in zip(self.cpu, self.clock, strict=True)]
        return {"clock": _rounded(self.clock), "cpu": _rounded(self.cpu), "net": _rounded(net)} | {
            f"cpu of {name}": _rounded(values) for name, values in self.others.items()
        }


def words(told: dict[str, Any]) -> str:
    """Medians in milliseconds."""
    return ", ".join(f"{name} {statistics.median(values) * 1e3:.2f} ms" for name, values in told.items())


def idle() -> dict[str, float]:
    """Seconds of this process's CPU in one in which nobody calls, by the names of its threads: all, and the busiest."""
    time.sleep(SETTLES_S)
    cpu, before = time.process_time(), _by_thread()
    time.sleep(IDLE_S)
    cpu, after = time.process_time() - cpu, _by_thread()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    taken: dict[str, float] = {}
    for number, (name, seconds) in after.items():
        name = names.get(number, name)
        taken[name] = taken.get(name, 0.0) + (seconds - before.get(number, ("", 0.0))[1]) / IDLE_S
    busiest = sorted(taken, key=lambda name: -taken[name])[:8]
    return {"all": round(cpu / IDLE_S, 6)} | {name: round(taken[name], 6) for name in busiest}


def _by_thread() -> dict[int, tuple[str, float]]:
    found: dict[int, tuple[str, float]] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, ran = (task / "comm").read_text().strip(), (task / "schedstat").read_text()
        except OSError:  # it has ended
            continue
        found[int(task.name)] = name, int(ran.split()[0]) / 1e9
    return found


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]


def real(ranks: int, rounds: int) -> dict[str, Any]:
    """A group of processes, called through relays and directly in turns."""
    from phalanx.runtime.calls.door import DirectDoor

    os.environ["PHALANX_RELAY_FROM"] = "2"
    with px.ResourcePool([ranks], use_gpu=False) as pool:
        began = time.perf_counter()
        group = px.WorkerGroup(pool, Light, show_ranks="none", start_timeout=600)
        started = time.perf_counter() - began
        core = group.core
        constructed = [one for one, _ in core.life.constructed]
        door: Any = core.door
        relays = [pid for _, _, _, pid in door.whereabouts()]
        processes: dict[str, Sequence[int]] = {
            "ranks": [endpoint.facts.pid for endpoint in core.endpoints],
            "relays": relays,
        }
        ways = {RELAYS: door, DIRECT: DirectDoor(core.transport)}
        calls = {"empty": group.nothing, "argument": lambda: group.take(1.5)}
        found = {(what, way): Taken() for what in calls for way in ways}
        for turn in range(rounds + 1):  # the first one warms up
            for way in sorted(ways, reverse=bool(turn % 2)):
                core.door = ways[way]
                time.sleep(SETTLES_S)
                group.nothing()
                for what, call in calls.items():
                    found[what, way].measure(call, processes, keep=turn > 0)
        core.door = ways[RELAYS]
        facts: dict[str, Any] = {"ranks": ranks, "relays": len(relays), "start": round(started, 1)}
        facts["apart"] = round(max(constructed) - min(constructed), 1)
        facts |= _idle_facts(idling := idle())
        facts["memory"] = round(sum(map(_own_memory, processes["ranks"])) / ranks / 2**20)
        return {**facts, **_told(found, idling["all"])}


def _idle_facts(idling: dict[str, float]) -> dict[str, Any]:
    told = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in idling.items())
    print(f"  idle, ms of CPU in a second: {told}", file=sys.stderr, flush=True)
    return {"idle": idling["all"], "idle threads": idling}


def _told(found: dict[tuple[str, str], Taken], idle: float) -> dict[str, Any]:
    told = {f"{what}, {way}": taken.told(idle) for (what, way), taken in found.items()}
    for name, some in told.items():
        print(f"  {name}: {words(some)}", file=sys.stderr, flush=True)
    return told


def _own_memory(pid: int) -> int:
    """Bytes of a process, its share of what it has in common with others included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def objects(ranks: int, rounds: int) -> dict[str, Any]:
    """A group whose hosts are objects in its relays, 32 in each."""
    import ray

    from phalanx.runtime.session import connection

    transport = HostedTransport()
    with connection.standing_in(transport), px.ResourcePool([ranks], use_gpu=False) as pool:
        began = time.perf_counter()
        group = px.WorkerGroup(pool, Light, show_ranks="none", start_timeout=600)
        relays = transport.made[-1]
        relays.whereabouts()
        started = time.perf_counter() - began
        if group.take(1.5) != [1.5] * ranks:
            raise RuntimeError("the hosts do not answer as they are asked")
        before = _counted(ray, relays)
        taken = Taken()
        for turn in range(rounds + 1):
            taken.measure(group.nothing, {}, keep=turn > 0)
        calls = (rounds + 1) * CALLS
        counted = _counted(ray, relays)
        seen = {
            "messages": (counted.calls + counted.to_ranks - before.calls - before.to_ranks) / calls,
            "hops": counted.hops,
        }
        planned = {"messages": len(relays.tree.relays) + ranks, "hops": relays.tree.hops}
        if seen != planned:
            raise RuntimeError(f"counted {seen}, planned {planned}")
        facts = {
            "objects": ranks,
            "relays": len(relays.tree.relays),
            "heads": relays.tree.heads,
            **_idle_facts(idling := idle()),
        }
        told = _told({("empty", RELAYS): taken}, idling["all"])
        return {**facts, **planned, "start": round(started, 1), **told}


def _counted(ray: Any, relays: Any) -> Counted:
    told = ray.get([handle.counted.remote() for handle in relays._handles])
    return Counted(
        sum(one.calls for one in told), sum(one.to_ranks for one in told), max(one.hops for one in told)
    )


def main() -> None:
    """Measure what is asked for; a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--objects", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    px.init(num_cpus=max(4, *given.ranks, 0) if given.ranks else 4)
    for ranks in given.ranks:
        print(json.dumps(real(ranks, given.rounds)), flush=True)
    for ranks in given.objects:
        print(json.dumps(objects(ranks, given.rounds)), flush=True)
    px.shutdown()


if __name__ == "__main__":
    main()
