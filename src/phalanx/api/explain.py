"""``px.explain`` and ``px.debug.status``: tables that describe pools, groups and the cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phalanx.api.methods import BoundMethod
from phalanx.api.view import GroupView
from phalanx.api.worker_group import WorkerGroup
from phalanx.collect.message import rank_list
from phalanx.declare.dispatch_modes import Execute, Mode
from phalanx.declare.register import MethodSpec
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError
from phalanx.pools.pool import ResourcePool
from phalanx.session.session import session
from phalanx.topology.placement import amount_text, amounts_text
from phalanx.wire.value import Value

_METHOD_COLUMNS = ("method", "dispatch", "ranks", "arguments", "result", "a bare call", "options")


def explain(subject: Value) -> Table:
    """Return a table that describes a pool, group, view or method.

    Args:
        subject: a pool or a group (where each rank runs); ``group.method`` or a view, such as ``group[:]`` (methods:
            signature, mode, how arguments are sent).

    Raises:
        DeclarationError: if ``subject`` has another type.
    """
    if isinstance(subject, ResourcePool | WorkerGroup):
        return subject.explain()
    if isinstance(subject, GroupView):
        role = f"role {subject.role} of " if subject.role else ""
        title = f"{role}group {subject.core.name}, {rank_list(subject.ranks)}"
        return _methods_table(title, subject._selection.which, subject.methods)  # pyright: ignore
    if isinstance(subject, BoundMethod):
        spec: MethodSpec = subject.spec  # pyright: ignore[reportUnknownMemberType]
        note = "what a call would do: .explain(...) of it, with the arguments"
        return _methods_table(subject.__qualname__, subject._selection.which, {spec.name: spec}, note)  # pyright: ignore
    raise DeclarationError(
        f"px.explain({subject!r}): got {type(subject).__name__}; expected a pool, a group, a view such as "
        "group[:], or group.method"
    )


def _methods_table(title: str, which: str, methods: Mapping[str, MethodSpec], *notes: str) -> Table:
    return Table(title, _METHOD_COLUMNS, tuple(_row(*item, which) for item in methods.items()), notes)


def _row(name: str, spec: MethodSpec, which: str) -> tuple[Any, ...]:
    mode, zero = spec.mode, spec.execute is Execute.RANK_ZERO
    one = zero or which != "all"
    chosen = "one" if zero or mode.mesh is None else "one dp coordinate"
    arguments = "as they are" if one else _arguments(mode)
    return (
        f"{name}{spec.signature or '(...)'}",
        mode.name if mode.kind == "custom" else repr(mode),
        chosen if which != "all" else "0" if zero or mode.kind == "rank zero" else "all",
        arguments,
        "the value" if one else _result(mode),
        "waits" if spec.blocking else "returns a CallFuture",
        ", ".join(_options(spec)) or None,
    )


def _arguments(mode: Mode) -> str:
    """Describe how arguments reach the ranks."""
    if mode.kind == "custom":
        return f"as {getattr(mode.dispatch_fn, '__name__', repr(mode.dispatch_fn))} makes them"
    over = None if mode.mesh is None else "dp and pp" if mode.pp_as_dp else "dp"
    return {
        "same": "the same to all",
        "lists": f"lists, one element per {over}" if over else "lists of world_size, one element each",
        "rows": f"rows, split over {over or 'the ranks'}",
        "rank zero": "as they are",
    }[mode.kind]


def _result(mode: Mode) -> str:
    """Describe the result of a call."""
    collect = mode.collect
    if callable(collect):
        return f"as {getattr(collect, '__name__', repr(collect))} makes it"
    if mode.kind == "rank zero":
        return "the value" if collect == "first" else "-"
    by = "rank" if mode.mesh is None else "dp"
    texts = {
        "join": "rows joined",
        "list": f"list by {by}",
        "first": f"the value of the first {by}",
        "none": "-",
    }
    return texts[collect]


def _options(spec: MethodSpec) -> list[str]:
    flags = ("readonly", "to_device", "rerun_on_restart", "replicated", "is_async", "streams")
    shown = {"is_async": "async", "streams": "yields"}
    found = [shown.get(flag, flag) for flag in flags if getattr(spec, flag)]
    if spec.pad_to_multiple is not None:
        found.append(f"rows padded to a multiple of {spec.pad_to_multiple}")
    return found


def status(backend: str | None = None) -> Table:
    """Return a table of the cluster's nodes: total and free resources, and the holders of resources.

    ``.to_dict()`` returns the table as data.
    """
    other_backend = session.get_backend(backend)
    rows: list[tuple[Any, ...]] = []
    held_by_node: dict[str, list[str]] = {}
    for holder in other_backend.holders():
        held = f"{holder.name} ({amounts_text(holder.resources)})"
        held_by_node.setdefault(holder.node_id, []).append(held)
    for node in other_backend.nodes():
        holders = "; ".join(held_by_node.get(node.node_id, ()))
        for name in sorted(name for name in node.total if not name.startswith("accelerator_type:")):
            free, total = (amount_text(name, of.get(name, 0.0)) for of in (node.available, node.total))
            rows.append((node.host, node.node_id[:8], name, free, total, holders))
            holders = ""  # only on the first row of a node
    notes = [_pool_line(pool) for pool in session.pools()] or ["no pools in this process"]
    if other_backend.name == "ray":
        from phalanx.backends.ray import cluster as ray_cluster  # loads Ray

        notes.append(f"address, for RAY_ADDRESS and `phalanx top --address`: {ray_cluster.address()}")
    return Table(
        f"cluster ({other_backend.name} backend, run {session.run_id}, driver pid {os.getpid()})",
        ("host", "node", "resource", "free", "total", "held by"),
        tuple(rows),
        tuple(notes),
    )


def _pool_line(pool: Any) -> str:
    groups = ", ".join(f"{group.name} ({group.world_size} ranks, {group.state})" for group in pool.groups)
    return f"pool {pool.name}: {pool.world_size} slots; groups: {groups or 'none'}"
