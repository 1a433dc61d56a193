"""Private parts of Ray, and variants of its public functions that never start a cluster.

Ray's public functions call ``ray.init()`` if no cluster is connected. A background thread of this library must never
do so after the user's ``ray.shutdown()``. So this module calls the wrapped functions (``__wrapped__``), which raise
instead. No other module uses private parts of Ray; ``tests/backends/test_private.py`` checks them on a real cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

_TESTED = "2.57 to 2.60"

try:
    from ray import _raylet
    from ray._private import services, state, utils, worker
    from ray._private.object_ref_generator import ObjectRefGenerator as ObjectRefGenerator
    from ray._private.state import GlobalState
    from ray.core.generated import autoscaler_pb2

    raylet: Any = _raylet
    worker_module: Any = worker
    _NEEDED: dict[Any, str] = {
        ActorHandle: "_actor_method_call",
        ActorClass: "_remote",
        GlobalState: "get_draining_nodes",
        internal_kv: "_internal_kv_get _internal_kv_put _internal_kv_del internal_kv_get_gcs_client",
        raylet: "AuthenticationTokenLoader Config GcsClient GcsClientOptions CoreWorker",
        raylet.CoreWorker: "get_local_actor_state get_current_task_id get_current_task_name "
        "serialize_object_ref deserialize_and_register_object_ref",
        services: "find_gcs_addresses find_bootstrap_address",
        state: "state total_resources_per_node available_resources_per_node",
        utils: "parse_runtime_env_for_task_or_actor read_ray_address",
        worker_module: "global_worker WORKER_MODE",
    }
    for _owner, _names in _NEEDED.items():
        for _name in _names.split():
            getattr(_owner, _name)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"phalanx needs private parts of Ray that Ray {ray.__version__} does not have ({error}); "
        f"install a tested version, {_TESTED}"
    ) from error

#: State of an actor: ray.core.generated.gcs_pb2.ActorTableData.DEAD.
DEAD = 4
#: ray.core.generated.gcs_pb2.NodeDeathInfo.Reason: EXPECTED_TERMINATION, AUTOSCALER_DRAIN_PREEMPTED and ..._IDLE.
TERMINATED = (1, 3, 4)
#: Loggers of Ray's errors while it unpickles an exception, and of errors that are never fetched.
SERIALIZATION_LOGGER = "ray._private.serialization"
WORKER_LOGGER = "ray._private.worker"
AUTH_VARIABLE = "RAY_AUTH_MODE"
_KV_NAMESPACE = b"phalanx"


def unwrapped(function: Any) -> Any:
    """Return the function inside Ray's wrappers, which would start a cluster or redirect the call to a client."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


get = unwrapped(ray.get)
put = unwrapped(ray.put)
wait = unwrapped(ray.wait)
kill = unwrapped(ray.kill)
cancel = unwrapped(ray.cancel)
get_actor = unwrapped(ray.get_actor)
runtime_context = unwrapped(ray.get_runtime_context)
nodes = unwrapped(ray.nodes)
placement_group = unwrapped(placement_group)
placement_group_table = unwrapped(placement_group_table)
remove_placement_group = unwrapped(remove_placement_group)
_create_actor = unwrapped(ActorClass._remote)
#: Return the address of the cluster that was started last on this machine, dead or alive.
last_address = utils.read_ray_address
#: Return the total, or the free, resources by node id.
total_resources, free_resources = state.total_resources_per_node, state.available_resources_per_node


def create_actor(cls: type, *args: Any, **options: Any) -> ActorHandle:
    """Start an actor of a class and return its handle without waiting.

    Args:
        cls: a plain class, or the result of ``ray.remote`` for a class.
        args: positional arguments of its constructor.
        options: options as in ``ActorClass.options``.
    """
    actor_class = cls if isinstance(cls, ActorClass) else ray.remote(cls)
    if options.get("runtime_env"):  # ActorClass._remote expects a parsed runtime_env
        options["runtime_env"] = utils.parse_runtime_env_for_task_or_actor(options["runtime_env"])
    return _create_actor(actor_class, args=list(args), kwargs={}, **options)


def call(
    handle: Any, method: str, *args: Any, name: str = "", returns: int | str = 1, buffer: int | None = None
) -> Any:
    """Call an actor's method. Return a reference, a list of references, or a generator of references.

    Args:
        handle: handle of the actor.
        method: name of the method.
        args: positional arguments.
        name: name of the task in dashboards; default: the name of the method.
        returns: number of returned objects, or "streaming".
        buffer: maximum number of stream items that wait to be taken; None: no limit.
    """
    return handle._actor_method_call(
        method,
        args=args,
        name=name,
        num_returns=returns,
        max_task_retries=0,
        generator_backpressure_num_objects=buffer,
        enable_task_events=True,
    )


def current_call_id() -> int:
    """Return the id of the actor task that this code runs in, comparable with :func:`call_id`."""
    return call_id(_core().get_current_task_id())


def task_name() -> str:
    """Return the name of the actor task that this code runs in."""
    return _core().get_current_task_name()


def call_id(ref: Any) -> int:
    """Return the id of an actor task, or of the task that returns an object.

    An object's id begins with the id of its task, and a task's id ends with the 16 bytes of the actor's id.
    """
    return int.from_bytes(ref.binary()[:8], "little")


def class_name(handle: Any) -> str:
    """Return the name of an actor's class."""
    return handle._ray_actor_creation_function_descriptor.class_name


def actor_id(handle: Any) -> Any:
    """Return Ray's id of an actor."""
    return handle._ray_actor_id


def actor_states() -> Callable[[Any], int | None]:
    """Return the function that maps an actor's id to its state, as far as this process knows; 0.15 us a call."""
    return _core().get_local_actor_state


def _core() -> Any:
    core_worker = worker_module.global_worker.core_worker
    if core_worker is None:
        raise ValueError("this process is not connected to a Ray cluster")
    return core_worker


def connection() -> object:
    """Return an object that identifies this process's current connection to a cluster."""
    return worker_module.global_worker.node


def is_connected() -> bool:
    """Return whether this process is connected to a cluster. Takes 0.1 us."""
    return bool(worker_module.global_worker.connected)


def accelerator_ids() -> tuple[str, ...]:
    """Return the ids of the accelerators that Ray assigned to this process."""
    found = runtime_context().get_accelerator_ids().values()
    return next((tuple(map(str, ids)) for ids in found if ids), ())


def log_folder() -> str | None:
    """Return the folder of this node's log files, or None if this process belongs to no cluster."""
    node = getattr(worker_module, "_global_node", None)
    return None if node is None else node.get_logs_dir_path()


def runs_in_cluster_process() -> bool:
    """Return whether this process was started by Ray, or started the cluster that it is connected to."""
    node = getattr(worker_module, "_global_node", None)
    is_worker = worker_module.global_worker.mode == worker_module.WORKER_MODE
    return is_worker or (node is not None and node.is_head())


def cluster_addresses() -> set[str]:
    """Return the addresses of the clusters whose head runs on this machine."""
    return set(services.find_gcs_addresses())


def bootstrap_address() -> str | None:
    """Return the address that ``ray.init(address="auto")`` would connect to, or None."""
    return services.find_bootstrap_address(None)


def draining_nodes() -> dict[str, int]:
    """Return the ids of the nodes that are being drained, with their deadlines in ms since 1970; 0: no deadline."""
    return state.state.get_draining_nodes()


def autoscaling_state() -> Any:
    """Return the last report of Ray's autoscaler, version 2; its ``autoscaler_state_version`` is 0 if none runs."""
    messages: Any = autoscaler_pb2
    client: Any = internal_kv.internal_kv_get_gcs_client()
    return messages.GetClusterStatusReply.FromString(client.get_cluster_status()).autoscaling_state


def write_key(key: str, value: bytes | None) -> None:
    """Write a key of the cluster's key-value store; None removes the key."""
    if value is None:
        internal_kv._internal_kv_del(key.encode(), namespace=_KV_NAMESPACE)
    else:
        internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_KV_NAMESPACE)


def read_key(key: str) -> bytes | None:
    """Return the value of a key of the cluster's key-value store, or None if there is none."""
    return internal_kv._internal_kv_get(key.encode(), namespace=_KV_NAMESPACE)


def address_of(ref: Any) -> tuple[bytes, bytes, bytes]:
    """Return an object's id, its owner and its serialized status, for :func:`reference_to`.

    Pickling a reference outside of Ray's own messages would keep its object for as long as this process lives.
    """
    _, owner, status = _core().serialize_object_ref(ref)
    return ref.binary(), owner, status


def reference_to(address: tuple[bytes, bytes, bytes]) -> Any:
    """Return a reference to an object of another process, which must keep the object alive until it is read."""
    binary, owner, status = address
    ref = ray.ObjectRef(binary, owner)  # pyright: ignore[reportArgumentType]
    _core().deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    return ref


class ClusterClient:
    """A connection to a cluster's control store (GCS), for a process that does not join the cluster.

    ``seconds`` is the timeout of each request.

    Raises:
        Exception: if the cluster does not respond or refuses this process. Ray documents no type.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self._address = address
        self._client: Any = raylet.GcsClient(address=address)
        self._seconds = seconds

    def keys_written(self) -> list[str]:
        """Return the keys that this library wrote."""
        found = self._client.internal_kv_keys(b"", namespace=_KV_NAMESPACE, timeout=self._seconds)
        return [key.decode() for key in found]

    def read(self, key: str) -> bytes | None:
        """Return the value of a key that this library wrote, or None if there is none."""
        return self._client.internal_kv_get(key.encode(), namespace=_KV_NAMESPACE, timeout=self._seconds)

    def remove(self, key: str) -> None:
        """Remove a key that this library wrote."""
        self._client.internal_kv_del(key.encode(), False, _KV_NAMESPACE, timeout=self._seconds)

    def metadata(self) -> bytes | None:
        """Return the metadata that the cluster wrote at its start, as JSON, with the versions of Ray and Python."""
        return self._client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=self._seconds)

    def nodes(self) -> dict[Any, Any]:
        """Return Ray's protobuf messages of the nodes, by node id."""
        return self._client.get_all_node_info(timeout=self._seconds)

    def jobs(self) -> dict[str, bool]:
        """Return, by job id, whether the driver of the job is alive."""
        jobs = self._client.get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True
        )
        return {job_id.hex(): not info.is_dead for job_id, info in jobs.items()}

    def actor_names(self) -> list[str]:
        """Return the names of the living actors that have a name."""
        cluster: Any = GlobalState()
        options = raylet.GcsClientOptions.create(
            self._address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True
        )
        cluster._initialize_global_state(options)
        actors: dict[str, dict[str, Any]] = cluster.actor_table(None, None, "ALIVE")
        return [actor["Name"] for actor in actors.values() if actor["Name"]]


def use_own_token() -> None:
    """Use the user's authentication token, if there is one, for clusters from now on.

    A local cluster requires a token by default, but Ray configures only the cluster's own driver for it.
    """
    if raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        os.environ[AUTH_VARIABLE] = "token"
        raylet.Config.initialize("")
