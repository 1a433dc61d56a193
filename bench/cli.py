"""The command line of the benchmark: start the contenders, run the plan, report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench import plot, table
from bench.engines import turns as engine
from bench.environment import ROOT, PeerUnavailable, compile_sources, contender_env, verl_python
from bench.protocol import ContenderLost, Peer, RequestFailed
from bench.runner import Run
from bench.scenarios import BARE, FLOOR, FULL, PHALANX, QUICK, VERL, Block, blocks, goals
from bench.stats import Row, as_json, rows_of
from bench.trainers import turns

PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "performance.png"
RESULTS = ROOT / "bench" / "results"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sizes and repetitions, under three minutes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="only scenarios whose name, or cases whose label ('flow, 4 items a rank, 1 rank'), contains it; "
        "verl_trainers (half an hour) and engine run only so",
    )
    parser.add_argument("--without", action="append", default=[], metavar="CONTENDER", help="leave one out")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the results go")
    parser.add_argument("--minutes", type=float, default=9.0, help="repeat as little as possible after that")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 0 if phalanx was measured, else 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options, console = arguments(argv), Console(width=None if sys.stdout.isatty() else 220)
    plan = list(narrowed(list(blocks(QUICK if options.quick else FULL)), options.only))
    begun = time.monotonic()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="pxb"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        status = stack.enter_context(console.status("contenders start"))
        run = Run({}, begun + 60 * options.minutes, lambda text: _say(status, console, text))
        versions = start_contenders(run, folder, options.without, stack) if plan else {}
        load = os.getloadavg()[0]
        for block in plan:
            run.walk(block)
        if any(turns.SCENARIO.startswith(name) for name in options.only or ()):
            run.samples += turns.measure(run.say)
        if options.only and any(name in engine.SCENARIO for name in options.only):
            run.samples += engine.measure(run.say)
    rows = rows_of(run.samples, {**goals(), **turns.goals(), **engine.goals()})
    facts = {
        **machine(),
        "load average at the start": round(load, 1),
        "seconds": round(time.monotonic() - begun),
    }
    _print(console, rows, run)
    complete = not options.quick and not options.only and not options.without
    path = options.json or RESULTS / ("latest.json" if complete else "partial.json.tmp")
    write_json(path, rows, run, facts, versions)
    console.print(f"results: {path}")
    if complete and PHALANX in run.peers:
        plot.draw(rows, PICTURE)
        table.write_into_page(PAGE, page_section(rows, run, facts, versions))
        console.print(f"table: {PAGE}, plot: {PICTURE}")
    return 0 if any(PHALANX in row.summaries for row in rows) else 1


def _say(status: Any, console: Console, text: str) -> None:
    status.update(text)
    if text.startswith("note:"):
        console.print(text, markup=False)


def narrowed(plan: list[Block], only: Sequence[str] | None) -> list[Block]:
    """Return the blocks with the named scenarios only; blocks without any are dropped."""
    if not only:
        return plan
    kept: list[Block] = []
    for block in plan:
        steps, apart = (
            tuple(s for s in some if any(name in s.case.scenario or name in s.case.label() for name in only))
            for some in (block.steps, block.apart)
        )
        starts = block.starts if any(name in "start" for name in only) else 0
        if steps or apart or starts:
            groups = block.groups if steps or starts else ()
            changed = {"steps": steps, "apart": apart, "groups": groups, "starts": starts}
            kept.append(dataclasses.replace(block, **changed, start_warmups=0))
    return kept


def start_contenders(
    run: Run, folder: Path, without: Sequence[str], stack: ExitStack
) -> dict[str, dict[str, str]]:
    """Start every contender that can run here into `run.peers`. Return the versions that they report."""
    compile_sources()
    pythons = {PHALANX: Path(sys.executable), BARE: Path(sys.executable), FLOOR: Path(sys.executable)}
    if VERL not in without:
        try:
            run.say("verl's environment")
            pythons[VERL] = verl_python()
        except PeerUnavailable as error:
            run.notes.append(f"verl is skipped: {error}")
            run.say(f"note: verl is skipped: {error}")
    versions: dict[str, dict[str, str]] = {}
    for name, python in pythons.items():
        if name in without:
            continue
        own = folder / name.replace(" ", "-")
        own.mkdir()
        command = [str(python), "-m", "bench.contender", name]
        peer = Peer(name, command, contender_env(own), own / "stderr.txt", ROOT)
        stack.callback(peer.close)
        try:
            versions[name] = peer.ask("connect", timeout=180.0)
            run.peers[name] = peer
        except (RequestFailed, ContenderLost) as error:
            run.notes.append(f"{name} is left out: {error}")
            run.say(f"note: {name} is left out: {error}")
    return versions


def machine() -> dict[str, Any]:
    """Return a description of the machine, without names of hosts or users."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_info() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": psutil.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _print(console: Console, rows: list[Row], run: Run) -> None:
    console.print("median (lowest; quartiles) and ratios of medians: above 1x phalanx is faster")
    for scenario in dict.fromkeys(
        row.case.scenario for row in rows
    ):  # with those alone who were measured in it
        of_scenario = [table.cells(row) for row in rows if row.case.scenario == scenario]
        columns, lines = table.measured(table.headings(), of_scenario)
        console.print(table.rich_table(scenario.replace("_", " "), columns, lines))
    if run.accounts:
        lines = [table.account_cells(account) for account in run.accounts]
        console.print(table.rich_table("memory above idle, one untimed run", table.account_headings(), lines))
    for note in run.notes:
        console.print(f"note: {note}", markup=False)


def write_json(
    path: Path, rows: list[Row], run: Run, facts: dict[str, Any], versions: dict[str, dict[str, str]]
) -> None:
    """Write all measurements, including single repetitions."""
    samples: dict[str, dict[str, list[float]]] = {}
    for sample in run.samples:
        samples.setdefault(sample.case.label(), {}).setdefault(sample.contender, []).append(sample.seconds)
    content = {
        "machine": facts,
        "versions": versions,
        "rows": [as_json(row) for row in rows],
        "repetitions": samples,
        "accounts": [dataclasses.asdict(account) for account in run.accounts],
        "notes": run.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def page_section(
    rows: list[Row], run: Run, facts: dict[str, Any], versions: dict[str, dict[str, str]]
) -> str:
    """Return the text between the markers of docs/performance.md."""
    described = ", ".join(f"{name} {value}" for name, value in facts.items())
    installed = sorted({f"{name} {number}" for found in versions.values() for name, number in found.items()})
    parts = [f"Machine: {described}.", f"Versions: {', '.join(installed)}."]
    parts.append(table.page_tables(rows))
    if run.accounts:
        parts.append("Memory above idle, one untimed run each:")
        lines = [table.account_cells(account) for account in run.accounts]
        parts.append(table.markdown_table(table.account_headings(), lines))
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(parts)
