"""Faults to inject into a running group.

    faults.raises(group, rank=2, error=ValueError("bad batch"), method="update")
    faults.kill(group, rank=1)
    with faults.full_store(0.9):
        ...

They act on the worker processes themselves, so a test sees the same behavior as a user.
"""

from __future__ import annotations

import contextlib
import signal as signals
import time
from collections.abc import Generator
from typing import Any

from phalanx.api.view import GroupView
from phalanx.errors import DeclarationError
from phalanx.session.session import session


class InjectedFault(RuntimeError):
    """Error of an injected or scripted "raise", unless the test passes its own error."""


def kill(group: GroupView, rank: int, signum: int = signals.SIGKILL) -> None:
    """End the process of a rank by a signal (SIGKILL, SIGTERM, SIGABRT, SIGSEGV, ...)."""
    (chosen,) = _view_of(group, rank).ranks
    group.core.backend.signal([group.core.endpoints[chosen]], signum)


def stop(group: GroupView, rank: int) -> None:
    """Freeze the process of a rank (SIGSTOP): it keeps its memory, and does nothing. Not for the inline backend."""
    kill(group, rank, signals.SIGSTOP)


def resume(group: GroupView, rank: int) -> None:
    """Let a frozen rank continue (SIGCONT)."""
    kill(group, rank, signals.SIGCONT)


def raises(
    group: GroupView, rank: int, error: BaseException | None = None, *, method: str, on_call: int = 1
) -> None:
    """Make a method raise ``error`` on a rank, once, at its ``on_call``-th call from now."""
    raised = error if error is not None else InjectedFault(f"injected into rank {rank}")
    _view_of(group, rank).run(_patch, method, on_call, raised, 0.0)


def slow(group: GroupView, rank: int, seconds: float, *, method: str, on_call: int = 1) -> None:
    """Make a method take ``seconds`` longer on a rank, once, at its ``on_call``-th call from now."""
    _view_of(group, rank).run(_patch, method, on_call, None, seconds)


def _view_of(group: GroupView, rank: int) -> GroupView:
    (chosen,) = group._selection.chosen_ranks("faults", rank)  # pyright: ignore[reportPrivateUsage]
    return group[group.ranks.index(chosen)]


def _patch(worker: Any, method: str, on_call: int, error: BaseException | None, seconds: float) -> None:
    """Add a fault to a method of ``worker``, at its ``on_call``-th call from now. The method is wrapped once."""
    inner = getattr(worker, method)
    waiting = vars(worker).setdefault(f"faults of {method}", [])
    waiting.append([on_call, seconds, error])
    if len(waiting) > 1:
        return

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for fault in waiting:
            fault[0] -= 1
        for _, seconds, error in [fault for fault in waiting if fault[0] == 0]:
            time.sleep(seconds)
            if error is not None:
                raise error
        return inner(*args, **kwargs)

    vars(worker)[method] = wrapper


def drop_node(ray_cluster: Any, group: GroupView, rank: int) -> str:
    """Kill the raylet of a rank's node, as if the node was lost. Return the id of the node.

    Args:
        ray_cluster: a ``ray.cluster_utils.Cluster`` on whose worker nodes the group runs.
        group: the group.
        rank: the rank whose node is killed.

    Raises:
        DeclarationError: if the rank is not on a worker node of the cluster.
    """
    node_id = group.core.endpoints[rank].facts.slot.node_id
    for node in list(ray_cluster.worker_nodes):
        if node.node_id == node_id:
            ray_cluster.remove_node(node, allow_graceful=False)
            return node_id
    raise DeclarationError(
        f"drop_node: rank {rank} of {group.name} is on node {node_id}, which is not a worker node of this cluster "
        "(the head cannot be dropped); place the group on nodes made with cluster.add_node(...)"
    )


@contextlib.contextmanager
def full_store(fraction: float = 0.9, *, backend: str | None = None) -> Generator[int]:
    """Fill the object store of the first node up to ``fraction`` of its size. Yield the number of stored bytes."""
    if not 0 < fraction <= 1:
        raise DeclarationError(f"full_store({fraction!r}): expected a fraction above 0, at most 1")
    storing = session.get_backend(backend)
    node = storing.nodes()[0]
    size = int(node.total.get("object_store_memory", 0) * fraction)
    chunk = min(16 * 2**20, max(size, 1))
    held = [storing.put(bytes(chunk)) for _ in range(size // chunk)]
    yield len(held) * chunk
