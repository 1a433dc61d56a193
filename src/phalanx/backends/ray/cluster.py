"""Start, join and leave a Ray cluster. Only ``start`` may start a cluster, never a late call of this library."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

import ray

from phalanx.backends.backend_types import CLUSTER_LEFT
from phalanx.backends.ray import private
from phalanx.errors import GroupClosed

_ANSWERS_WITHIN_S = 2.0
_log = logging.getLogger("phalanx")


def is_running() -> bool:
    """Return whether this process is connected to a cluster."""
    return bool(ray.is_initialized())


def start(options: dict[str, Any]) -> None:
    """Connect to the cluster that ``options`` or the environment name, else start a local cluster.

    Ray records the cluster that was started last on this machine, and would wait a minute for it even if it has died.
    So a recorded cluster that does not respond is ignored, with a warning.
    """
    noted = None
    if not (options.get("address") or os.environ.get("RAY_ADDRESS")):
        with contextlib.suppress(Exception):  # private to Ray: if it fails, ray.init() decides
            noted = private.last_address()
    if noted is not None and not answers(noted, _ANSWERS_WITHIN_S):
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


def answers(address: str, seconds: float) -> bool:
    """Return whether a connection to ``host:port`` is accepted within ``seconds``."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def stop() -> None:
    """Leave the cluster, and end it if this process started it."""
    ray.shutdown()


def address() -> str:
    """Return the address of the connected cluster, ``host:port``."""
    return private.runtime_context().gcs_address


class Connection:
    """This process's connection to a cluster, from ``ray.init()`` to ``ray.shutdown()``."""

    def __init__(self) -> None:
        self._connection = private.connection()

    @property
    def open(self) -> bool:
        """True if this connection is still the current connection. Takes 0.1 us."""
        return private.connection() is self._connection and private.is_connected()

    def check(self) -> None:
        """Check that this connection is still the current connection.

        Raises:
            GroupClosed: if the cluster was left.
        """
        if not self.open:
            raise GroupClosed(f"a call came too late. {CLUSTER_LEFT}")
