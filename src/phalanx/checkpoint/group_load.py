"""One group's part of a saved step, back into its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.checkpoint.checkpoint_rpc import answers_of, outputs_of, send_each
from phalanx.checkpoint.storage.steps import SavedStep
from phalanx.checkpoint.storage.tensor_index import CATALOGUE
from phalanx.checkpoint.worker import checkpoint_handlers as questions
from phalanx.checkpoint.worker.checkpoint_requests import Loaded, LoadOrder, title_of
from phalanx.errors import CheckpointMismatch, DeclarationError
from phalanx.weights.sync_sides import Ranks

__all__ = ["check_names", "check_taken", "load_group", "prefix_of"]


def load_group(
    group: Ranks, step: SavedStep, prefix: str = "", *, parts: Sequence[str] | None = None
) -> list[Loaded]:
    """Load what ``GroupSave(..., prefix)`` wrote; what each rank read.

    First every rank sees whether all fits; nothing is changed until they all have.

    Args:
        group: a group, a role of it, or some of its ranks.
        parts: the outermost keys of the states that are loaded; None: all.

    Raises:
        CheckpointMismatch: what was saved does not fit; nothing was changed.
        CheckpointCorrupted: a file is missing or not what was written. Ranks may have loaded parts of their state
        by then. As ``CallFuture.result``.
    """
    roles = _roles(group, step, prefix)
    facts = step.manifest.files
    orders = [
        LoadOrder(
            {role: step.path(part) for role, part in roles.items()},
            {role: facts[f"{part}/{CATALOGUE}"] for role, part in roles.items()},
            None if parts is None else tuple(parts),
            index,
            len(group.ranks),
        )
        for index in range(len(group.ranks))
    ]
    title = f"load {group.name!r} step {step.number}"
    with step.reading():
        planned = send_each(group, f"{title}: plan", questions.plan_load, orders)
        left: list[dict[str, list[str]]] = answers_of(group, planned)
        check_taken(left, {role: step.path(part) for role, part in roles.items()})
        call = send_each(group, f"{title}: read", questions.load, orders)
        return outputs_of(group, call, title)


def check_names(verb: str, parts: Any) -> None:
    """Parts are a list of names: a text would be taken for its letters."""
    if isinstance(parts, str):
        raise DeclarationError(f"{verb}(parts={parts!r}): give a list of names, such as [{parts!r}]")


def prefix_of(group: Ranks, step: SavedStep, name: str | None) -> str:
    """Of the folders in which a ``px.checkpoint.CheckpointManager`` has saved a group; none where ``px.save`` did.

    Raises:
        CheckpointMismatch: the step has no group of that name, or several, and nothing says which.
    """
    parts = [part for part, facts in step.parts.items() if facts.get("kind") == "group" and "/" in part]
    names = sorted({part.split("/")[1] for part in parts})
    if not names and name is None:
        return ""
    if name is None:
        name = names[0] if len(names) == 1 else group.core.name
    if name not in names:
        raise CheckpointMismatch(
            f"{step.folder} has the groups {', '.join(names)}, and none is named {name!r}; say which: px.load(name=)"
            if names
            else f"{step.folder} was saved by px.save, without names of groups; leave out name={name!r}"
        )
    return f"groups/{name}/"


def _roles(group: Ranks, step: SavedStep, prefix: str) -> dict[str, str]:
    """Parts of the step by the role that each is for."""
    saved = {
        str(facts["role"]): part
        for part, facts in step.parts.items()
        if facts.get("kind") == "group" and part.startswith(prefix) and "/" not in part.removeprefix(prefix)
    }
    if not saved:
        raise CheckpointMismatch(
            f"{step.folder} has no state of a group; it has {', '.join(step.parts) or 'nothing'}"
        )
    role = group.role
    if role in saved:
        return {role: saved[role]}
    mine = set(group.core.card.callables)
    if role or mine <= {""}:
        if len(saved) == 1:
            return {role: next(iter(saved.values()))}
        raise CheckpointMismatch(
            f"{step.folder} has the roles {', '.join(map(title_of, sorted(saved)))}, and none is named "
            f"{title_of(role)!r}; load into a role of that name"
        )
    missing = sorted(saved.keys() - mine)
    if missing:
        raise CheckpointMismatch(
            f"{step.folder} has the role {title_of(missing[0])!r}, which group {group.name!r} does not have; its roles "
            f"are {', '.join(sorted(mine))}. Load the roles one by one: px.load(group.{sorted(mine)[0]}, path)"
        )
    return saved


def check_taken(left: Sequence[Mapping[str, Sequence[str]]], folders: Mapping[str, str]) -> None:
    """See to it that nothing of what was saved is left out without a word.

    Args:
        left: what each rank does not take, by role.
        folders: where it was saved, by role.

    Raises:
        CheckpointMismatch: some of it is taken by no rank.
    """
    for role, folder in folders.items():
        nobody = set(left[0].get(role, ())).intersection(*(one.get(role, ()) for one in left[1:]))
        if nobody:
            names = sorted(nobody)
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise CheckpointMismatch(
                f"{len(names)} values of {folder} are taken by no rank: {shown}; the workers here have "
                "no such names. Load what is wanted with parts=[...]"
            )
