"""What drivers publish on a cluster, in Ray's own key-value store; read without being a driver oneself."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.experimental import internal_kv

from phalanx.config import running_cluster
from phalanx.display.registry_records import ClusterRegistry, read_notices
from phalanx.errors import PlacementError

_NAMESPACE = b"phalanx"
_AUTH_VARIABLE = "RAY_AUTH_MODE"
_ANSWERS_WITHIN_S = 5.0
_CONNECTS_WITHIN_S = 2.0


def publish(key: str, value: bytes | None) -> None:
    """Write a key of this cluster, or remove it."""
    if not ray.is_initialized():
        return
    if value is None:
        internal_kv._internal_kv_del(key.encode(), namespace=_NAMESPACE)
    else:
        internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_NAMESPACE)


def published(key: str) -> bytes | None:
    """What is written under a key of this cluster."""
    return internal_kv._internal_kv_get(key.encode(), namespace=_NAMESPACE)


@dataclass(frozen=True)
class NodeView:
    """A node of the cluster."""

    node_id: str
    host: str
    address: str
    alive: bool
    resources: dict[str, float]


class ClusterReader:
    """Reads what is known of a cluster from outside: no job, no process, no log of its own."""

    def __init__(self, address: str | None = None) -> None:
        self.address = find_cluster(address)
        _use_own_token()
        try:
            host, _, port = self.address.rpartition(":")
            # Ray's own client keeps trying for 40 s where nobody listens.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECTS_WITHIN_S).close()
            self._gcs: Any = GcsClient(address=self.address)
            self._gcs.internal_kv_keys(b"", namespace=_NAMESPACE, timeout=_ANSWERS_WITHIN_S)
        except Exception as error:
            raise PlacementError(
                f"the cluster at {self.address} does not answer ({_said(error)}); is it running there? "
                "`ray status` tells, and --address names another one"
            ) from None

    def notices(self) -> ClusterRegistry:
        """What drivers that live, and detached groups, have published; what dead ones left is removed."""
        found = read_notices(self._entries())
        jobs = [job for job, alive in self._jobs().items() if alive]
        stale = found.stale(jobs, ())
        if not stale:
            return found
        if any(group.detached for group in found.groups):
            stale = found.stale(jobs, self._names())
        for key in stale:
            self._gcs.internal_kv_del(key.encode(), False, _NAMESPACE, timeout=_ANSWERS_WITHIN_S)
        return found.without(stale)

    def nodes(self) -> list[NodeView]:
        """The nodes of the cluster."""
        return [
            NodeView(
                node_id=info.node_id.hex(),
                host=info.node_manager_hostname,
                address=info.node_manager_address,
                alive=info.state == 0,
                resources=dict(info.resources_total),
            )
            for info in self._gcs.get_all_node_info(timeout=_ANSWERS_WITHIN_S).values()
        ]

    def metadata(self) -> bytes | None:
        """What the cluster notes of itself when it starts, as JSON: versions of ray and python among others."""
        with contextlib.suppress(Exception):  # private to Ray, and only shown
            return self._gcs.internal_kv_get(
                b"CLUSTER_METADATA", namespace=b"cluster", timeout=_ANSWERS_WITHIN_S
            )
        return None

    def _entries(self) -> dict[str, bytes]:
        keys: Iterable[bytes] = self._gcs.internal_kv_keys(
            b"", namespace=_NAMESPACE, timeout=_ANSWERS_WITHIN_S
        )
        values = {
            key: self._gcs.internal_kv_get(key, namespace=_NAMESPACE, timeout=_ANSWERS_WITHIN_S)
            for key in keys
        }
        return {key.decode(): value for key, value in values.items() if value is not None}

    def _jobs(self) -> dict[str, bool]:
        """Whether each driver lives, by its id."""
        jobs = self._gcs.get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True
        )
        return {job_id.hex(): not info.is_dead for job_id, info in jobs.items()}

    def _names(self) -> list[str]:
        """Names of the actors that are alive."""
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions  # pyright: ignore[reportAttributeAccessIssue]

        state: Any = GlobalState()
        state._initialize_global_state(
            GcsClientOptions.create(
                self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True
            )
        )
        actors: dict[str, dict[str, Any]] = state.actor_table(None, None, "ALIVE")
        return [actor["Name"] for actor in actors.values() if actor["Name"]]


def _use_own_token() -> None:
    """Show the user's token where the environment says nothing of it; a cluster that asks for none lets it pass.

    A local cluster asks for one by default, but only its own driver is told so.
    """
    if os.environ.get(_AUTH_VARIABLE):
        return
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

        if AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            os.environ[_AUTH_VARIABLE] = "token"
            Config.initialize("")


def find_cluster(address: str | None = None) -> str:
    """The address that was given or that ``RAY_ADDRESS`` names, else that of the cluster on this machine.

    Raises:
        PlacementError: there is none.
    """
    given = address or running_cluster()
    if given and given not in ("auto", "local"):
        return given
    found = sorted(services.find_gcs_addresses())
    current = services.find_bootstrap_address(None)
    if current in found or (current and not found):
        return current
    if len(found) == 1:
        return found[0]
    if found:
        lines = [f"  {one}  {_drivers_of(one)}" for one in found]
        raise PlacementError(
            "several clusters run on this machine: say which one by --address or RAY_ADDRESS\n"
            + "\n".join(lines)
        )
    raise PlacementError(
        "no Ray cluster runs on this machine: start your driver first, or name a cluster by --address or RAY_ADDRESS"
    )


def _drivers_of(address: str) -> str:
    """Who runs on a cluster, in a line."""
    try:
        notices = ClusterReader(address).notices()
    except PlacementError:
        return "does not answer"
    runs = [
        f"{run.script} (pid {run.pid}): {', '.join(g.name for g in notices.groups_of(run.run)) or 'no groups'}"
        for run in notices.runs
    ]
    return "; ".join(runs) or "no driver of phalanx"


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:160] or type(error).__name__
