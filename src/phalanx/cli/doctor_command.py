"""`phalanx doctor`: problems of this machine, and their fixes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.cli.common import Address, AsJson, cluster_reader
from phalanx.cli.host_info import Machine, gather, variables
from phalanx.cli.machine_checks import Finding, facts, findings
from phalanx.config import running_cluster
from phalanx.errors import PlacementError

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster_reader import ClusterReader  # loads Ray

_FINDINGS = 1

_GPU_HELP = "Check CUDA IPC, NCCL and device tensors through a call, and nothing else."
Gpu = Annotated[bool, typer.Option("--gpu", help=_GPU_HELP)]


def doctor(address: Address = None, as_json: AsJson = False, gpu: Gpu = False) -> None:
    """Problems of this machine that concern ranks, each with its fix.

    Looks at versions, cores, accelerators and variables that hide them, shared memory, limits, ports, huge pages; and
    at what a cluster counts on this host, where one runs. Run it on each node that is suspect.

    Examples:

      phalanx doctor

      phalanx doctor --address 10.0.0.1:6379 --json

      phalanx doctor --gpu

    Exit codes: 0 no findings; 1 findings; 2 the cluster that was named does not answer.
    """
    if gpu:
        from phalanx.cli.gpu_check import check_devices, report  # torch: only for this option

        results = check_devices()
        typer.echo(json.dumps([result._asdict() for result in results]) if as_json else report(results))
        raise typer.Exit(_FINDINGS if any(result.result != "ok" for result in results) else 0)
    environment = variables()  # before the cluster is asked, which may show it the user's token
    cluster, why_not = _cluster(address)
    machine = replace(gather(cluster, environment), no_cluster=why_not)
    found = findings(machine)
    if as_json:
        data = {"machine": asdict(machine), "findings": [finding._asdict() for finding in found]}
        typer.echo(json.dumps(data, indent=1))
    else:
        Console().print(render(machine, found))
    raise typer.Exit(_FINDINGS if found else 0)


def _cluster(address: str | None) -> tuple[ClusterReader | None, str]:
    """Return the cluster that was named, or the one on this machine; otherwise the reason why there is none."""
    try:
        return cluster_reader(address), ""
    except PlacementError as error:
        if address or running_cluster():
            raise
        return None, str(error).splitlines()[0]


def render(machine: Machine, found: list[Finding]) -> Any:
    """Return the facts, then each finding with its fix."""
    wrong = {finding.topic for finding in found}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, value in facts(machine).items():
        mark = Text("!", "bold yellow") if name in wrong else Text("✓", "green")
        table.add_row(mark, Text(name, "bold"), Text(value))
    parts: list[Any] = [Text.assemble(("host ", "dim"), (machine.host, "bold")), Padding(table, (1, 0, 1, 2))]
    for number, finding in enumerate(found, 1):
        parts.append(Text.assemble((f"{number}. {finding.topic}: ", "bold yellow"), finding.what))
        parts.append(Padding(Text.assemble(("fix: ", "green"), finding.fix), (0, 0, 1, 3)))
    return Group(*parts, *([] if found else [Text("Nothing is wrong.", "green")]))
