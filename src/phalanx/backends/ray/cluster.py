"""Start, join, leave and read a Ray cluster. Only ``start`` may start a cluster, never a late call of this library.

Drivers publish entries in a cluster's key-value store, which programs that are no drivers read by a ``ClusterReader``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from dataclasses import replace
from typing import Any

import ray

from phalanx.backends.backend_types import CLUSTER_LEFT
from phalanx.backends.ray import private
from phalanx.config import running_cluster
from phalanx.display.registry_records import ClusterRegistry, read_registry
from phalanx.errors import GroupClosed, PlacementError

_CONNECTS_WITHIN_S = 2.0
_ANSWERS_WITHIN_S = 5.0
_log = logging.getLogger("phalanx")


def is_running() -> bool:
    """Return whether this process is connected to a cluster."""
    return ray.is_initialized()


def start(options: dict[str, Any]) -> None:
    """Connect to the cluster that ``options`` or the environment name, else start a local cluster.

    Ray records the cluster that was started last on this machine, and would wait a minute for it even if it has died.
    So a recorded cluster that does not respond is ignored, with a warning.
    """
    noted = None
    if not (options.get("address") or os.environ.get("RAY_ADDRESS")):
        with contextlib.suppress(Exception):  # private to Ray: if it fails, ray.init() decides
            noted = private.last_address()
    if noted is not None and not answers(noted, _CONNECTS_WITHIN_S):
        _log.warning(
            "the Ray cluster that was started last on this machine, %s, does not answer; a new one is started",
            noted,
        )
        options = {**options, "address": "local"}
    options = {"include_dashboard": False, "logging_level": logging.WARNING, **options}
    ray.init(**options)


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


class ClusterReader:
    """Reader of a cluster's state from outside: it adds no job, process or log to the cluster."""

    def __init__(self, address: str | None = None) -> None:
        self.address = find_cluster(address)
        if not os.environ.get(private.AUTH_VARIABLE):
            private.use_own_token()
        try:
            if not answers(self.address, _CONNECTS_WITHIN_S):  # Ray's own client would keep trying for 40 s
                raise ConnectionRefusedError("nothing listens there")
            self._client = private.ClusterClient(self.address, _ANSWERS_WITHIN_S)
            self._client.keys_written()
        except Exception as error:
            said = " ".join(str(error).split())[:160] or type(error).__name__
            raise PlacementError(
                f"the cluster at {self.address} does not answer ({said}); is it running there? "
                "Check with `ray status`, or name another cluster with --address"
            ) from None

    def registry(self) -> ClusterRegistry:
        """Return the entries of living drivers and detached groups; remove the entries of dead drivers."""
        keys = self._client.keys_written()
        entries = {key: value for key in keys if (value := self._client.read(key)) is not None}
        found = read_registry(entries)
        detached = any(group.detached for group in found.groups)
        jobs = [job for job, alive in self._client.jobs().items() if alive]
        stale = found.stale(jobs, self._client.actor_names() if detached else ())
        for key in stale:
            self._client.remove(key)
        kept = read_registry({key: data for key, data in entries.items() if key not in stale})
        return replace(kept, runs=tuple(replace(run, ended=run.job not in jobs) for run in kept.runs))

    def nodes(self) -> list[tuple[str, dict[str, float]]]:
        """Return the host and the resources of each living node."""
        found = self._client.nodes().values()
        return [(node.node_manager_hostname, dict(node.resources_total)) for node in found if node.state == 0]

    def versions(self) -> dict[str, str | None]:
        """Return the versions of Ray and Python that the cluster was started with; None: unknown."""
        metadata: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # private to Ray, and only for display
            metadata = json.loads(self._client.metadata() or b"{}")
        return {name: metadata.get(f"{name}_version") for name in ("ray", "python")}


def find_cluster(address: str | None = None) -> str:
    """Return ``address``, else the value of ``RAY_ADDRESS``, else the address of the cluster on this machine.

    Raises:
        PlacementError: if no cluster is named and this machine runs none, or several.
    """
    given = address or running_cluster()
    if given and given not in ("auto", "local"):
        return given
    found = sorted(private.cluster_addresses())
    current = private.bootstrap_address()
    if current in found or (current and not found):
        return current
    if len(found) == 1:
        return found[0]
    if found:
        raise PlacementError(
            "several clusters run on this machine: say which one by --address or RAY_ADDRESS: "
            + ", ".join(found)
        )
    raise PlacementError(
        "no Ray cluster runs on this machine: start your driver first, or name a cluster by --address or RAY_ADDRESS"
    )
