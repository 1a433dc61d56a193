"""The scenario `scale`: CPU of the driver and time of a call to many ranks, through relays and directly."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.environment import ROOT, contender_env
from bench.scenarios import DIRECT, LIMIT, PHALANX, SMALLER
from bench.stats import Case, Goal, Sample

SCENARIO = "scale"
RANKS, OBJECTS = (16, 64, 128), (1024, 4096)
_LIMIT_S = 0.010
_PATIENCE_S = 1200.0
_WAYS = {PHALANX: "relays", DIRECT: "direct"}
_CALLS = ("empty", "argument")
CPU, CLOCK = "CPU of the driver", "by the clock"
NET = f"{CPU} less what it takes while idle"


def case(ranks: int, call: str, what: str) -> Case:
    return Case(SCENARIO, ranks, variant=f"{call} call, {what}")


def objects_case(ranks: int) -> Case:
    return Case(SCENARIO, ranks, variant=f"empty call, ranks as objects, {CPU}")


def goals() -> dict[Case, tuple[Goal, ...]]:
    """A fifth of the driver's CPU at 64 ranks for 1.15x the time; thousands of ranks for 10 ms of it."""
    found: dict[Case, tuple[Goal, ...]] = {}
    for call in _CALLS:
        found[case(64, call, CPU)] = (Goal(DIRECT, 1 / 5),)
        found[case(64, call, CLOCK)] = (Goal(DIRECT, 1.15),)
        found[case(128, call, CPU)] = (Goal(SMALLER, 1.5),)
    for ranks in OBJECTS:
        found[objects_case(ranks)] = (Goal(LIMIT, 1.0),)
    return found


def measure(say: Callable[[str], None]) -> list[Sample]:
    """Each number of ranks in a cluster of its own; what cannot be measured becomes a note."""
    samples: list[Sample] = []
    for option, numbers in (("--ranks", RANKS), ("--objects", OBJECTS)):
        for ranks in numbers:
            say(f"scale, {ranks} ranks{' as objects' if option == '--objects' else ''}")
            found = _run(option, ranks, say)
            if found is not None:
                facts = {name: value for name, value in found.items() if not isinstance(value, Mapping)}
                say(f"note: scale: {', '.join(f'{name} {value}' for name, value in facts.items())}")
                samples += samples_of(found)
    return [*samples, *beside_smaller(samples)]


def _run(option: str, ranks: int, say: Callable[[str], None]) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory(prefix="pxs") as folder:
        ended = subprocess.run(
            [sys.executable, str(ROOT / "bench" / "scale.py"), option, str(ranks)],
            env=contender_env(Path(folder)),
            cwd=ROOT,
            timeout=_PATIENCE_S,
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode != 0 or not lines:
        say(f"note: scale, {ranks} ranks, is left out: {ended.stderr.strip()[-500:]}")
        return None
    return json.loads(lines[-1])


def samples_of(found: Mapping[str, Any]) -> Iterator[Sample]:
    """The repetitions in what one run printed."""
    if "objects" in found:
        ranks = found["objects"]
        yield from (Sample(objects_case(ranks), PHALANX, s) for s in found["empty, relays"]["cpu"])
        yield Sample(objects_case(ranks), LIMIT, _LIMIT_S)
        for what, key in ((NET, "net"), (CLOCK, "clock")):
            named = case(ranks, "empty", f"ranks as objects, {what}")
            yield from (Sample(named, PHALANX, s) for s in found["empty, relays"][key])
        return
    for call in _CALLS:
        for contender, way in _WAYS.items():
            for what, key in ((CPU, "cpu"), (NET, "net"), (CLOCK, "clock")):
                for seconds in found[f"{call}, {way}"][key]:
                    yield Sample(case(found["ranks"], call, what), contender, seconds)


def beside_smaller(samples: list[Sample]) -> Iterator[Sample]:
    """The driver's CPU at 64 ranks beside that at 128."""
    for call in _CALLS:
        for sample in samples:
            if sample.case == case(64, call, CPU) and sample.contender == PHALANX:
                yield Sample(case(128, call, CPU), SMALLER, sample.seconds)
