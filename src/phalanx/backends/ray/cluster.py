"""Starting, joining and leaving a Ray cluster; nothing of ours starts one by a call that comes too late."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray
from ray._private import auto_init_hook
from ray._private import utils as ray_utils
from ray._private.worker import global_worker

from phalanx.backends.backend_types import CLUSTER_LEFT
from phalanx.errors import GroupClosed
from phalanx.wire.value import Value

_ANSWERS_WITHIN_S = 2.0
_log = logging.getLogger("phalanx")


def is_running() -> bool:
    """Whether this process is connected to a cluster."""
    return bool(ray.is_initialized())


def start(options: dict[str, Any]) -> None:
    """Connect to the cluster that ``options`` or the environment name; start a local one if there is none.

    Ray notes the cluster that was started last on this machine, also once that has died, and would wait for it for a
    minute; one that does not answer is passed over.
    """
    noted = None if options.get("address") or os.environ.get("RAY_ADDRESS") else _noted_address()
    if noted is not None and not _answers(noted):
        _log.warning(
            "the Ray cluster that was started last on this machine, %s, does not answer; a new one is started",
            noted,
        )
        options = {**options, "address": "local"}
    defaults: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": True,
        "logging_level": logging.WARNING,
    }
    ray.init(**{**defaults, **options})


def _noted_address() -> str | None:
    """The address of the cluster that Ray's ``init()`` would join; None where there is none, or nobody can tell."""
    try:
        return ray_utils.read_ray_address()
    except Exception:  # private to Ray: without it, Ray finds out by itself
        return None


def _answers(address: str) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def stop() -> None:
    """Leave the cluster; a local one that this process started ends."""
    ray.shutdown()


def address() -> str:
    """Where the cluster is found, host:port."""
    return ray.get_runtime_context().gcs_address


def job_id() -> str:
    """Id of this driver's job."""
    return ray.get_runtime_context().get_job_id()


class Connection:
    """This process's connection to a cluster, from ``ray.init()`` to ``ray.shutdown()``; a later one is another."""

    def __init__(self) -> None:
        self._node = global_worker.node  # Ray makes a new object for each connection
        _start_no_cluster()

    @property
    def open(self) -> bool:
        """Whether it is the connection of now; costs 0.1 us."""
        return global_worker.node is self._node and bool(global_worker.connected)

    def check(self) -> None:
        """See to it that it is the connection of now.

        Raises:
            GroupClosed: the cluster was left.
        """
        if not self.open:
            raise GroupClosed(f"a call came too late. {CLUSTER_LEFT}")


class _AutoConnect:
    """Stands for the flag by which Ray starts a cluster at any call that finds none.

    Such a call made by this library comes from a group of a cluster that was left, and is refused, in whichever
    thread it is made; one made by the user's code starts a cluster as it always did.
    """

    def __init__(self, flag: object) -> None:
        self._flag = flag

    def __bool__(self) -> bool:
        if global_worker.connected or ray.is_initialized():
            return False
        if _is_ours(sys._getframe(1)):
            raise GroupClosed(f"a call came too late. {CLUSTER_LEFT}")
        return bool(self._flag)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is not Ray's belongs to this library."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != "ray":
            return package == "phalanx"
        frame = frame.f_back
    return False


def _start_no_cluster() -> None:
    if not isinstance(auto_init_hook.enable_auto_connect, _AutoConnect):
        auto_init_hook.enable_auto_connect = _AutoConnect(auto_init_hook.enable_auto_connect)


def around_shutdown(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have two functions called before and after each ``ray.shutdown()`` of this process, whoever calls it.

    Ray has no hook for it, so the public function is replaced, once for all. Whoever imported the former one leaves
    the cluster without these calls: what they do is then done late, by whoever notices it.
    """
    shutdown = ray.shutdown

    @functools.wraps(shutdown)
    def in_order(*args: Value, **kwargs: Value) -> Value:
        try:
            before()
        except Exception:
            _log.warning("ray.shutdown(): not all groups could be closed before", exc_info=True)
        try:
            return shutdown(*args, **kwargs)
        finally:
            after()

    ray.shutdown = in_order
