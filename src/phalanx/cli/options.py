"""Options and arguments of the commands on a cluster, each declared once."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from phalanx.cli.common import cluster_reader


def complete_group(incomplete: str) -> list[str]:
    """Return names of groups for the shell; none without a cluster."""
    with contextlib.suppress(Exception):  # a shell that completes a word shows no errors
        groups = cluster_reader(None).notices().groups
        return sorted(group.name for group in groups if group.name.startswith(incomplete))
    return []


_GROUP_HELP = "Name of a group, or the beginning or end of it; RUN/NAME where names repeat."
_ADDRESS_HELP = "The cluster, host:port. (default: RAY_ADDRESS, else the one on this machine)"
GroupName = Annotated[str, typer.Argument(metavar="GROUP", help=_GROUP_HELP, autocompletion=complete_group)]
OnlyGroup = Annotated[
    str | None, typer.Argument(metavar="[GROUP]", help="Only this group.", autocompletion=complete_group)
]
Ranks = Annotated[list[int] | None, typer.Option("--rank", "-r", help="Only this rank; repeatable.")]
Address = Annotated[str | None, typer.Option("--address", help=_ADDRESS_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
