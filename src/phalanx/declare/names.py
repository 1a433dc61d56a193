"""Names that belong to a group and so may not be taken by registered worker methods, roles or modes."""

from __future__ import annotations

#: Public attributes of WorkerGroup and its views; a test holds this list against the classes themselves.
RESERVED = frozenset(
    {
        "any",
        "attach",
        "call",
        "close",
        "closed",
        "core",
        "epoch",
        "execute_all",
        "execute_all_async",
        "execute_all_sync",
        "execute_rank_zero",
        "execute_rank_zero_async",
        "execute_rank_zero_sync",
        "explain",
        "mesh",
        "method",
        "methods",
        "name",
        "options",
        "number",
        "pool",
        "profile",
        "rank",
        "ranks",
        "restart",
        "role",
        "roles",
        "run",
        "spawn",
        "stack",
        "state",
        "statistics",
        "submit",
        "world_size",
    }
)
