"""`phalanx simulate SCRIPT`: a script, unchanged, on a cluster that is a model."""

from __future__ import annotations

import contextlib
import json
import math
import re
import runpy
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.trace import ROWS, print_report
from phalanx.errors import DeclarationError, PlacementError
from phalanx.runtime.tools.simulate import Shape, Simulation
from phalanx.tracing.events import Trace
from phalanx.tracing.files import check_path, write
from phalanx.tracing.report import report
from phalanx.transport.simulated.constants import Constants
from phalanx.transport.simulated.costs import Costs, parse, quantity, read
from phalanx.transport.simulated.model import Model

_RAISED = 1


Script = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="The script, as `python SCRIPT` would run it.")
]
Arguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments, behind --.")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the cluster.")]
Ranks = Annotated[int, typer.Option("--ranks-per-node", min=1, help="Slots of each node.")]
Cores = Annotated[int, typer.Option("--cores-per-node", min=1, help="Cores that the ranks of a node share.")]
OneCost = Annotated[
    list[str] | None,
    typer.Option("--cost", help='What a method costs: "Trainer.update=2.0s,out=4KB,spread=5%". Repeat it.'),
]
CostFiles = Annotated[
    list[Path] | None,
    typer.Option("--costs", help="Costs in TOML, or a trace (.json, .jsonl) of a real run."),
]
Run = Annotated[
    Literal["none", "one"],
    typer.Option("--run", help="Methods of which no value is stated: not run, or run on one rank for all."),
]
Pools = Annotated[
    Literal["fill", "written"],
    typer.Option("--pools", help="Each pool takes the whole cluster, or what the script asks for."),
]
PoolShapes = Annotated[
    list[str] | None,
    typer.Option("--pool", help="The shape of one pool by its name_prefix: rollout=256x8."),
]
Relays = Annotated[
    int | None,
    typer.Option(
        "--relays",
        min=0,
        help="From how many ranks on calls go through relays; 0: never. Default: PHALANX_RELAY_FROM.",
    ),
]
Mtbf = Annotated[
    float | None,
    typer.Option("--node-mtbf-hours", help="Mean time between failures of one node, in hours."),
]
Seed = Annotated[int, typer.Option("--seed", help="Decides spreads and failures.")]
Constant = Annotated[
    list[str] | None,
    typer.Option("--set", help="One of the model's constants: network_bytes_per_s=50e9."),
]
To = Annotated[
    list[Path] | None, typer.Option("--to", help="Write the trace: .html (a report), .json or .jsonl.")
]
Every = Annotated[bool, typer.Option("--all", help="Print every row of long tables.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def simulate(
    script: Script,
    arguments: Arguments = None,
    nodes: Nodes = 1,
    ranks: Ranks = 8,
    cores: Cores = 32,
    cost: OneCost = None,
    costs: CostFiles = None,
    run: Run = "none",
    pools: Pools = "fill",
    pool: PoolShapes = None,
    relays: Relays = None,
    mtbf: Mtbf = None,
    seed: Seed = 0,
    constant: Constant = None,
    to: To = None,
    every: Every = False,
    as_json: AsJson = False,
) -> None:
    """Run a script on a simulated cluster of any size: how long its calls and starts would take there.

    The script is not changed. Its pools get the slots of the simulated cluster; its groups have no processes, and
    their methods take the stated time and give the stated values.

    Examples:

      phalanx simulate train.py --nodes 1024 --ranks-per-node 8 --cost "Trainer.update=2.0s,out=4KB,spread=5%"

      phalanx simulate train.py --nodes 64 --costs measured.json --run one --to report.html

    Exit codes: 0 done; 2 the script cannot be run so; else the script's own, 1 where it raised.
    """
    for path in to or ():
        check_path(path)
    if mtbf is not None and not 0 < mtbf < math.inf:
        raise DeclarationError(f"--node-mtbf-hours {mtbf:g}: expected more than 0 hours")
    model = Model(
        nodes=nodes,
        ranks_per_node=ranks,
        cores=cores,
        run=run,
        fill=pools == "fill",
        seed=seed,
        hours_between_failures=mtbf,
        constants=constants_of(constant or ()),
    )
    simulation = Simulation(model, _stated(costs or (), cost or ()), shapes_of(pool or ()), relay_from=relays)
    code = _run(simulation, script, arguments or ())
    if simulation.trace is not None:
        _show(simulation.trace, to or (), as_json, None if every else ROWS)
    if code:
        raise typer.Exit(code)


def _stated(files: Sequence[Path], words: Sequence[str]) -> Costs:
    """What is stated of methods; the words have the last one."""
    stated = Costs()
    for file in files:
        stated.add(read(file))
    for text in words:
        stated.add(parse(text))
    return stated


def _show(trace: Trace, to: Sequence[Path], as_json: bool, rows: int | None) -> None:
    """Write the trace where it is wanted, and print the report."""
    for path in to:
        write(trace, path)
        typer.echo(f"written: {path}", err=as_json)
    made = report(trace)
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=1, default=str))
    else:
        print_report(made, rows)


def _run(simulation: Simulation, script: Path, arguments: Sequence[str]) -> int:
    """The script's exit code, as `python` would give it."""
    if not script.is_file():
        raise DeclarationError(f"{script}: there is no such file; give the script that `python` would run")
    with _as_main(script, arguments), simulation.running(title=f"{script.name}, simulated"):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else int(left.code is not None)
        except PlacementError:  # of the cluster that was asked for
            raise
        except Exception:
            traceback.print_exc()
            return _RAISED
    return 0


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Generator[None]:
    """What `python SCRIPT` sets."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def constants_of(given: Sequence[str]) -> Constants:
    """The model's constants with some of them set.

    Raises:
        DeclarationError: there is none of that name, or that is no number.
    """
    changed: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in Constants.names():
            known = ", ".join(Constants.names())
            raise DeclarationError(f"--set {text}: there is no constant {name!r}; there are: {known}")
        changed[name] = quantity(value, {}, f"--set {text}")
        if name.endswith("_per_s") and not changed[name]:
            raise DeclarationError(f"--set {text}: expected more than 0 bytes a second")
    return replace(Constants(), **changed)


def shapes_of(given: Sequence[str]) -> Mapping[str, Shape]:
    """The shapes of pools by their names, such as ``rollout=256x8``.

    Raises:
        DeclarationError: it is not written like that.
    """
    found: dict[str, Shape] = {}
    for text in given:
        match = re.fullmatch(r"([\w.-]+)=([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise DeclarationError(f"--pool {text}: expected NAME=NODESxRANKS, such as rollout=256x8")
        found[match[1]] = int(match[2]), int(match[3])
    return found
