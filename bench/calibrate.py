"""`python bench/calibrate.py`: the simulator fitted to groups of 8 and 16 ranks, and how well it predicts 32 and 64.

One program measures starts, calls and broadcasts; it is run on Ray and, the same, on the simulated backend. The
constants are fitted to the groups of 8 and 16 alone. The predictions are in the results' file before the larger groups
are started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import phalanx as px
from bench.accounts import thread_seconds
from phalanx.runtime.groups.relays import use_relays
from phalanx.runtime.tools.simulate import Simulation
from phalanx.transport.simulated.constants import Constants
from phalanx.transport.simulated.costs import Cost, Costs
from phalanx.transport.simulated.model import Model

STEPS = ("measure", "predict", "check")
FITTED, PREDICTED = (8, 16), (32, 64)
WARM = 3
RUNS = 2
"""Of each size: the least counts, of those that are fitted and of those that are predicted alike."""
RESULTS = Path(__file__).resolve().parent / "results" / "calibration.json"
MEGABYTES = (1, 16)
THROUGH = ", relays"
RELAYED = f"small call{THROUGH}"
RELAY_FROM = "PHALANX_RELAY_FROM"
ALLOWED = {
    "start": 0.35,
    "empty call": 0.20,
    "small call": 0.20,
    "broadcast 1 MB": 0.20,
    "broadcast 16 MB": 0.20,
    f"empty call{THROUGH}": 0.20,
    RELAYED: 0.20,
    f"broadcast 1 MB{THROUGH}": 0.20,
}
SWEPT_BYTES = 128 << 20
SHARE = "share of the process"
IDLE = "cpu of an idle rank"
"""Seconds of it in one second."""
SETTLES_S, IDLE_S = 3.0, 4.0
COPYING = 6
"""Threads with which Ray copies a large value into its store."""

Figures = dict[str, float]


class Light(px.Worker):
    """A rank without weights."""

    def __init__(self) -> None:
        self._swept: Any = None

    @px.register
    def nothing(self) -> None:
        """An empty call."""

    @px.register
    def take(self, value: Any) -> None:
        """A call with an argument."""

    @px.register
    def sweep(self) -> None:
        """Leave nothing of what processes work with in the caches of a core."""
        if self._swept is None:
            self._swept = np.zeros(SWEPT_BYTES, dtype=np.uint8)
        self._swept += 1


def program(ranks: int, calls: int, only: str = "") -> Figures:
    """What is measured, in seconds: on Ray, or in a simulation. ``only`` one figure of calls, where it is named.

    Groups of every size are started without relays and called directly, then through relays.
    """
    found: Figures = {}
    with px.ResourcePool([ranks], use_gpu=False) as pool:
        with _relays_from(0):
            begun = time.perf_counter()
            group = px.WorkerGroup(pool, Light)
            found["start"] = time.perf_counter() - begun
        values: dict[str, Any] = {f"broadcast {n} MB": np.ones(n << 18, dtype=np.float32) for n in MEGABYTES}
        values["small call"] = {"step": 1}
        direct = {"empty call": group.nothing, **{name: partial(group.take, values[name]) for name in values}}
        relayed = {f"{name}{THROUGH}": call for name, call in direct.items() if f"{name}{THROUGH}" in ALLOWED}
        found |= _of_calls(group, direct, calls, only)
        if only == "" or only in relayed:
            with _relays_from(2):
                use_relays(group.core, group.core.epoch)
            found |= _of_calls(group, relayed, calls, only)
        if only == "":
            found[IDLE] = _idle([endpoint.facts.pid for endpoint in group.core.endpoints])
    return found


def _idle(pids: Sequence[int]) -> float:
    """What one of these processes takes of a core while nobody calls it."""
    time.sleep(SETTLES_S)
    begun, cpu = time.perf_counter(), thread_seconds(pids)
    time.sleep(IDLE_S)
    return (thread_seconds(pids) - cpu) / (time.perf_counter() - begun) / len(pids)


@contextlib.contextmanager
def _relays_from(ranks: int) -> Generator[None]:
    before = os.environ.get(RELAY_FROM)
    os.environ[RELAY_FROM] = str(ranks)
    try:
        yield
    finally:
        os.environ.pop(RELAY_FROM)
        os.environ.update({} if before is None else {RELAY_FROM: before})


def _of_calls(group: Any, todo: Mapping[str, Callable[[], Any]], times: int, only: str) -> Figures:
    """The median of several calls of each kind, and of the driver's CPU for them; the kinds take turns.

    Before each, as many ranks as there are cores sweep the caches, as the work between two calls does. Without that
    a few processes would be quicker than many, whose memory no cache holds.
    """
    sweeping = group[0 : os.cpu_count() or 1]
    wanted = {name: call for name, call in todo.items() if only in ("", name)}
    taken: dict[str, list[float]] = {name: [] for name in wanted}
    busy: dict[str, list[float]] = {name: [] for name in wanted}
    for _ in range(times + WARM):
        for name, call in wanted.items():
            sweeping.sweep()
            begun, cpu = time.perf_counter(), time.process_time()
            call()
            taken[name].append(time.perf_counter() - begun)
            busy[name].append(time.process_time() - cpu)
    found = {name: statistics.median(taken[name][WARM:]) for name in wanted}
    return found | {f"driver cpu of {name}": statistics.median(busy[name][WARM:]) for name in wanted}


def measured(ranks: int, times: int) -> Figures:
    """The program on Ray, in processes and clusters of its own; the least of so many runs."""
    runs: list[Figures] = []
    for _ in range(times):
        command = [sys.executable, __file__, "--real", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        if done.returncode:
            raise SystemExit(f"measuring {ranks} ranks failed:\n{done.stderr[-3000:]}")
        runs.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    return {name: min(run[name] for run in runs) for name in runs[0]}


def simulated(ranks: int, constants: Constants, only: str = "") -> Figures:
    """The same program on the simulated backend: one node with the cores of this machine, the driver on it too."""
    cores = os.cpu_count() or 1
    model = Model(1, ranks, cores=cores, accelerators=False, driver_apart=False, constants=constants)
    costs = Costs({"*": Cost(0.0)})
    with Simulation(model, costs).running():
        return program(ranks, 1, only)


def fitted(truth: Mapping[int, Figures]) -> Constants:
    """The constants with which the simulator gives what was measured with the groups of 8 and 16."""
    few, many = truth[FITTED[0]], truth[FITTED[1]]
    more = FITTED[1] - FITTED[0]
    cores = os.cpu_count() or 1
    each = max(1e-6, (many["start"] - few["start"]) / more)
    driver = [
        {name: truth[ranks][f"driver cpu of {name}"] for name in ALLOWED if name != "start"}
        for ranks in FITTED
    ]
    cpu = max(1e-6, (driver[1]["small call"] - driver[0]["small call"]) / more)
    stored = _mean([busy["broadcast 16 MB"] - busy["broadcast 1 MB"] for busy in driver]) / (15 << 20)
    put = _mean([busy["broadcast 1 MB"] - busy["small call"] for busy in driver]) - stored * (1 << 20)
    made = replace(
        Constants(),
        idle_s=_mean([few[IDLE], many[IDLE]]),
        put_s=max(0.0, put),
        store_bytes_per_s=min(cores, COPYING) / max(1e-12, stored),
        submit_s=0.55 * cpu,
        take_s=0.45 * cpu,
        process_s=0.7 * each * cores,
        setup_s=0.3 * each * cores,
        start_s=0.0,
    )
    for name, figure, lowest, highest in (
        ("handle_s", "empty call", 1e-6, 0.02),
        ("call_s", "empty call", 0.0, 0.05),
        ("handle_s", "empty call", 1e-6, 0.02),
        ("argument_s", "small call", 0.0, 0.02),
        ("get_s", "broadcast 1 MB", 0.0, 0.02),
        ("copy_bytes_per_s", "broadcast 16 MB", 2e8, 1e11),
        ("get_s", "broadcast 1 MB", 0.0, 0.02),
        (SHARE, "start", 0.3, 0.95),
        ("start_s", "start", 0.0, 10.0),
        ("relay_each_s", RELAYED, 1e-6, 0.02),
        ("relay_call_s", RELAYED, 0.0, 0.05),
        ("relay_each_s", RELAYED, 1e-6, 0.02),
    ):
        made = _searched(made, truth, name, figure, lowest, highest)
    return made


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _with(constants: Constants, name: str, value: float) -> Constants:
    if name == "relay_each_s":  # one measurement for two: they are alike
        return replace(constants, relay_send_s=0.55 * value, relay_take_s=0.45 * value)
    if name == SHARE:  # of what each rank of a start costs: how much is saved where a process waits for it
        whole = constants.process_s + constants.setup_s
        return replace(constants, process_s=value * whole, setup_s=(1 - value) * whole)
    return replace(constants, **{name: value})


def _searched(
    constants: Constants, truth: Mapping[int, Figures], name: str, figure: str, lowest: float, highest: float
) -> Constants:
    """The value of one constant for which the errors of one figure are least: they have one minimum."""

    def error(value: float) -> float:
        changed = _with(constants, name, value)
        return sum(
            (simulated(ranks, changed, figure)[figure] / truth[ranks][figure] - 1) ** 2 for ranks in FITTED
        )

    golden = (5**0.5 - 1) / 2
    low, high = lowest, highest
    one, two = high - golden * (high - low), low + golden * (high - low)
    of_one, of_two = error(one), error(two)
    for _ in range(14):
        if of_one < of_two:
            high, two, of_two = two, one, of_one
            one = high - golden * (high - low)
            of_one = error(one)
        else:
            low, one, of_one = one, two, of_two
            two = low + golden * (high - low)
            of_two = error(two)
    return _with(constants, name, (low + high) / 2)


def errors(predicted: Mapping[int, Figures], truth: Mapping[int, Figures]) -> dict[str, dict[int, float]]:
    """By how much each prediction was off, as a part of the truth."""
    return {
        name: {
            ranks: predicted[ranks][name] / truth[ranks][name] - 1 for ranks in truth if ranks in predicted
        }
        for name in ALLOWED
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit, predict, write down; then measure what was predicted."""
    parser = argparse.ArgumentParser(prog="bench/calibrate.py", description=__doc__)
    parser.add_argument(
        "--real", type=int, metavar="RANKS", help="only measure that many ranks on Ray, as JSON"
    )
    parser.add_argument("--step", action="append", choices=STEPS, help="default: all, one after another")
    options = parser.parse_args(argv)
    if options.real:
        px.init(num_cpus=os.cpu_count() or 1, include_dashboard=False)
        print(json.dumps(program(options.real, 12)))
        return 0
    for step in options.step or STEPS:
        _STEPS[step]()
    return _report()


def _measure() -> None:
    """Groups of 8 and 16."""
    _write({"measured": {ranks: measured(ranks, RUNS) for ranks in FITTED}})


def _predict() -> None:
    """Fit the constants to them, and write down what larger groups will take."""
    truth = _figures(_read()["measured"])
    constants = fitted({ranks: truth[ranks] for ranks in FITTED})
    predicted = {ranks: simulated(ranks, constants) for ranks in (*FITTED, *PREDICTED)}
    kept = {ranks: truth[ranks] for ranks in FITTED}
    _write({"measured": kept, "constants": asdict(constants), "predicted": predicted})


def _check() -> None:
    """Measure what was predicted."""
    for ranks in PREDICTED:
        found = _read()
        found["measured"][str(ranks)] = measured(ranks, RUNS)
        _write(found)


_STEPS = {"measure": _measure, "predict": _predict, "check": _check}


def _read() -> Any:
    return json.loads(RESULTS.read_text())


def _figures(found: Mapping[str, Figures]) -> dict[int, Figures]:
    return {int(ranks): figures for ranks, figures in found.items()}


def _write(found: Mapping[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _report() -> int:
    """Print what was predicted and measured; 1 where a median error is larger than allowed."""
    found = _read()
    predicted, truth = _figures(found.get("predicted", {})), _figures(found["measured"])
    if not predicted:
        return 0
    off = errors(predicted, truth)
    print(f"{'':18}" + "".join(f"{ranks:>30}" for ranks in truth))
    for name, by_ranks in off.items():
        cells = (
            f"{1e3 * truth[ranks][name]:11.1f} {1e3 * predicted[ranks][name]:9.1f} ms {100 * error:+5.0f}%"
            for ranks, error in by_ranks.items()
        )
        print(f"{name:18}" + "".join(cells))
    failed = 0
    for kind, names in (
        ("start", ["start"]),
        ("calls and broadcasts", [name for name in ALLOWED if name != "start"]),
    ):
        larger = [abs(off[name][ranks]) for name in names for ranks in PREDICTED if ranks in off[name]]
        if larger:
            middle, allowed = statistics.median(larger), ALLOWED[names[0]]
            failed |= middle > allowed
            print(f"{kind}: median error at {PREDICTED} {100 * middle:.0f}%, allowed {100 * allowed:.0f}%")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
