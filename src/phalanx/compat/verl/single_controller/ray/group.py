"""``RayWorkerGroup``: workers as Ray actors, called as one. Its methods encode their arguments for Ray."""

from __future__ import annotations

import functools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.experimental import get_local_object_locations

from phalanx.backends.backend_types import TRACED
from phalanx.backends.ray.cluster import Connection
from phalanx.backends.ray.worker_actor import portable
from phalanx.compat.verl.single_controller.base.decorator import CheckFailed
from phalanx.compat.verl.single_controller.base.dispatch_functions import (
    _padding_size_key,
    each,
    is_future,
    protocol,
)
from phalanx.compat.verl.single_controller.base.worker_group import WorkerGroup
from phalanx.compat.verl.single_controller.ray.classes import RayClassWithInitArgs, _unwrap_ray_remote
from phalanx.compat.verl.single_controller.ray.pools import RayResourcePool
from phalanx.compat.verl.single_controller.ray.start import check_request, start
from phalanx.config import settings
from phalanx.wire.codec import Encoded

if TYPE_CHECKING:
    # This module loads the runtime.
    from phalanx.compat.verl.single_controller.ray.native import Call, StartedRanks

_OF_THIS_PROCESS = ("_connection", "wg_dict", "_started", "_made")
"""Attributes that are not copied to other groups of the same workers."""


@dataclass(eq=False)
class GroupMethod:
    """A registered method of a group, which dispatches, calls and collects."""

    group: Any
    method_name: str
    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]
    execute_fn: Callable[..., Any]
    blocking: bool

    def __post_init__(self) -> None:
        self.__name__ = self.method_name
        self.__qualname__ = f"{type(self.group).__name__}.{self.method_name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = each(_own, args, kwargs)
        args, kwargs = self.dispatch_fn(self.group, *args, **kwargs)
        padding = int(kwargs.pop(_padding_size_key, 0))
        output = self.execute_fn(self.__name__, *args, **kwargs)
        if self.blocking:
            output = self.collect_fn(self.group, self.group._wait(output))
        else:
            call = self.group._call_of(output)
            output = _tracked(self.collect_fn(self.group, output), call)
        return _without_padding(output, padding, args, kwargs) if padding else output

    def __repr__(self) -> str:
        return f"<{self.__qualname__} of {self.group.world_size} ranks>"


#: verl's name of the constructor of a group's methods.
func_generator = GroupMethod


def _tracked(output: Any, call: Call | None) -> Any:
    """Return a ``DataProtoFuture`` that raises the error of the call as soon as any rank has failed.

    Other outputs, and those of workers that are not tracked, are returned unchanged.
    """
    if call is None or not is_future(output):
        return output
    future = _future_class(type(output))(output.collect_fn, output.futures, output.dispatch_fn)
    future._call = call
    return future


def _await_ranks(call: Call) -> None:
    """Wait until all ranks have returned. Large outputs stay where they are, since not all may be collected.

    Raises:
        Exception: the error of the call, once a rank has failed.
    """
    arrivals = call.arrivals
    pending: Sequence[int] = range(len(arrivals))
    while pending:
        ended, pending = arrivals.wait(pending, 1, None)
        refs = [arrivals.reference(position).value for position in ended]
        stored = get_local_object_locations(refs)
        for position, ref in zip(ended, refs, strict=True):
            if not stored.get(ref, {}).get("node_ids") and not arrivals.outcome(position).ok:
                call.result(None)


@functools.cache
def _future_class(base: type) -> Any:
    class TrackedFuture(base):  # type: ignore[misc, valid-type]
        """A future of verl with a tracked call."""

        _call: Call

        def get(self) -> Any:
            try:
                _await_ranks(self._call)
                return super().get()
            except Exception:
                if self._call.over or self._call.has_failed():
                    self._call.result(None)
                raise

        def __reduce__(self) -> Any:  # calls are tracked by the process that made them
            return base, (self.collect_fn, self.futures, self.dispatch_fn)

    return TrackedFuture


def _own(value: Any) -> Any:
    """Return a copy of a list or dict: a dispatch function may change its arguments, but not the caller's."""
    return value.copy() if type(value) in (list, dict) else value


def _without_padding(output: Any, padding: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Remove the added rows from a joined output, or from the value of a future once it is joined.

    Lists by rank are returned unchanged.
    """
    shards = next((value for value in [*args, *kwargs.values()] if _is_data_protos(value)), [])
    total = sum(map(len, shards))
    if is_future(output):
        output.dispatch_fn = functools.partial(_trimmed, padding, total)
        return output
    return _trimmed(padding, total, output)


def _is_data_protos(value: Any) -> bool:
    data_proto = protocol().DataProto
    return isinstance(value, list) and bool(value) and all(isinstance(shard, data_proto) for shard in value)


def _trimmed(padding: int, total: int, output: Any) -> Any:
    if isinstance(output, list | tuple) or not hasattr(output, "__len__") or len(output) != total:
        return output
    return output[: total - padding]


class PayloadEncoder:
    """Encoder of one call's arguments. A value for several ranks is encoded and stored once.

    Attributes:
        stored: bytes of the large values, which go into the object store; Ray itself stores values for a single rank.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any, int]] = {}
        self._limit = settings().inline_bytes
        self.stored = 0

    def of(self, value: Any, shared: bool) -> Any:
        """Return the payload of ``value`` for one rank, or for several ranks if ``shared``."""
        known = self._made.get(id(value))
        if known is None:
            made = portable(value)
            nbytes = made.nbytes if isinstance(made, Encoded) else 0
            if nbytes > self._limit:
                self.stored += nbytes
                made = ray.put(made) if shared else made
            # The value is kept, so that its id is not reused.
            known = self._made[id(value)] = (value, made, nbytes)
        return known[1]

    def nbytes(self, values: Iterable[Any]) -> int:
        """Return the bytes of encoded values, as received by one rank."""
        return sum(self._made[id(value)][2] for value in values if id(value) in self._made)


class RayWorkerGroup(WorkerGroup):
    """One worker per slot of a pool, as Ray actors named ``{name_prefix}{Class}_{node}:{slot}``.

    Registered methods of the class are attributes of the group; any method can be called by name with
    ``execute_all*`` and ``execute_rank_zero*``.

    Args:
        resource_pool: slots of the ranks; None attaches to existing workers.
        ray_cls_with_init: the class and its constructor arguments.
        bin_pack: whether the slots of each node must be on one node ("STRICT_PACK"; else "PACK").
        name_prefix: prefix of the actors' names; random by default.
        worker_handles: the workers to attach to, which the group does not own.
        ray_wait_register_center_timeout: seconds within which all constructors must have returned.
        device_name: "cuda", "npu" or "cpu".
        use_gpu: False gives the ranks none of the pool's accelerators.
        worker_env: variables for every rank.
        profile_steps, worker_nsight_options: profile the ranks with nsight.
        master_addr, master_port, master_port_range: rendezvous of the ranks.

    Raises:
        PlacementError: if the slots cannot be reserved.
        WorkerInitError: if a constructor raised; also an instance of the raised type.
        ValueError: if ``worker_env`` sets a variable of the controller, such as RANK, or ``use_gpu`` is True on a pool
            without accelerators.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        *,
        worker_handles: list[Any] | None = None,
        ray_wait_register_center_timeout: float = 300,
        device_name: str = "cuda",
        use_gpu: bool | None = None,
        worker_env: Mapping[str, str] | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: Mapping[str, Any] | None = None,
        master_addr: str | None = None,
        master_port: str | None = None,
        master_port_range: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = secrets.token_hex(4) if name_prefix is None else name_prefix
        self._ray_wait_register_center_timeout = ray_wait_register_center_timeout
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self.sub_cls_name = ""
        self.wg_dict: dict[str, RayWorkerGroup] | None = None
        self.device_name = device_name
        self.profile_steps = profile_steps
        self.worker_nsight_options = worker_nsight_options
        self.customized_worker_env = worker_env or {}
        self._master_addr, self._master_port = master_addr, master_port
        self._ray_master_port_range = master_port_range
        self._role = ""
        self._connection: Connection | None = None
        self._started: StartedRanks | None = None  # of this group, or of the group whose role it is
        self._made = threading.local()
        if resource_pool is None:
            if not worker_handles:
                raise CheckFailed(
                    "RayWorkerGroup without a resource_pool attaches to workers that exist: give worker_handles=[...]"
                )
            self._workers = list(worker_handles)
        else:
            check_request(resource_pool, ray_cls_with_init, self.customized_worker_env, use_gpu)
            self.resource_pool = resource_pool
            self.use_gpu = resource_pool.use_gpu if use_gpu is None else use_gpu
            self._start(bin_pack)
        self._connection = Connection()
        self._bind_methods()

    def _start(self, bin_pack: bool) -> None:
        self._started = start(self, "STRICT_PACK" if bin_pack else "PACK")
        self._workers, self._worker_names = self._started.handles, self._started.names
        self._master_addr, self._master_port = self._started.master

    @property
    def _user_class(self) -> Any:
        return _unwrap_ray_remote(self.ray_cls_with_init.cls)

    def _bind_methods(self) -> None:
        """Add the registered methods of the class, or of the role, as attributes of this group."""
        if self.ray_cls_with_init is None:
            return
        cls = self._user_class
        if self.sub_cls_name:
            self._bind_worker_method(cls.raw_cls_dict[self.sub_cls_name], func_generator)
            return
        self._bind_worker_method(cls, func_generator)
        for name, alias in (cls.role_methods[self._role] if self._role else {}).items():
            setattr(self, name, getattr(self, alias))

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """Return a group for each role of a colocated group, by name."""
        if self.fused_worker_used or getattr(self._user_class, "is_fused_worker", False):
            return self.spawn_fused(prefix_set)
        roles = self._known_roles(prefix_set, "role_methods")
        return {role: self._role_group(_role=role) for role in roles}

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """Return a group for each role of a fused group, by name."""
        roles = self._known_roles(prefix_set, "raw_cls_dict")
        return {role: self._role_group(sub_cls_name=role, fused_worker_used=True) for role in roles}

    def _known_roles(self, roles: Iterable[str], table: str) -> list[str]:
        """Return the names of roles, checked against a table of the class. Raises CheckFailed for an unknown role."""
        known: dict[str, Any] = getattr(self._user_class, table, {})
        chosen = list(roles)
        for role in chosen:
            if role not in known:
                raise CheckFailed(
                    f"{self._user_class.__name__} has no role {role!r}; its roles: {sorted(known)}"
                )
        return chosen

    def _role_group(self, **role: Any) -> RayWorkerGroup:
        """Return the group of a role: the same workers, with the role's methods and meshes."""
        own: dict[str, Any] = {"_dispatch_info": {}, "_collect_info": {}}
        group = _rebuild(type(self), {**self._state(), **role, **own}, [])
        group._started = self._started
        return group

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the roles attributes of this group: ``group.actor.update(...)``."""
        if self.wg_dict is None:
            self.wg_dict = self.spawn(prefix_set)
        for role, group in self.wg_dict.items():
            setattr(self, role, group)

    def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one worker and return Ray's reference to the result."""
        if self.sub_cls_name:
            return worker._fuw_execute.remote(f"{self.sub_cls_name}_fwmn_{method_name}", *args, **kwargs)
        return getattr(worker, self._on_handle(method_name)).remote(*args, **kwargs)

    def _on_handle(self, method_name: str) -> str:
        if not self._role:
            return method_name
        return self._user_class.role_methods[self._role].get(method_name, method_name)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call rank 0 with the arguments unchanged, and wait."""
        return self._wait(self.execute_rank_zero_async(method_name, *args, **kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call rank 0 with the arguments unchanged. Return Ray's reference to the result."""
        return self._send(self._workers[:1], method_name, args, kwargs)[0]

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`execute_rank_zero_async`, also that of a subclass."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call :meth:`execute_all_async`, also that of a subclass."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every rank, and wait."""
        return self._wait(self.execute_all_async(method_name, *args, **kwargs))

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every rank. Return Ray's references to the results, by rank.

        If all arguments are lists of world_size elements, each rank gets one element of each list; otherwise all
        ranks get the same arguments.
        """
        values = [*args, *kwargs.values()]
        if all(isinstance(value, list) and len(value) == len(self._workers) for value in values):
            return self._deal(self._workers, method_name, args, kwargs)
        return self._send(self._workers, method_name, args, kwargs)

    def _send(self, workers: list[Any], method_name: str, args: Any, kwargs: Any) -> list[Any]:
        """Call workers with the same arguments."""
        columns = [[arg] * len(workers) for arg in args]
        named = {key: [value] * len(workers) for key, value in kwargs.items()}
        return self._deal(workers, method_name, columns, named)

    def _call_of(self, output: Any) -> Call | None:
        """Return this thread's last call, if ``output`` is the call's references or only reference."""
        call, refs = self._made.__dict__.pop("last", (None, ()))
        return call if call is not None and (output is refs or output is refs[0]) else None

    def _deal(self, workers: list[Any], method_name: str, args: Any, kwargs: Any) -> list[Any]:
        """Call workers, each with its element of every argument. Calls of own ranks are tracked."""
        if self._connection is not None:
            self._connection.check()  # raises GroupClosed if this process has left the workers' cluster
        payloads = PayloadEncoder()
        columns: list[list[Any]] = [*args, *kwargs.values()]
        uses = Counter(id(element) for column in columns for element in column)

        def payload(element: Any) -> Any:
            return payloads.of(element, uses[id(element)] > 1)

        arguments = [
            (
                [payload(arg[rank]) for arg in args],
                {key: payload(value[rank]) for key, value in kwargs.items()},
            )
            for rank in range(len(workers))
        ]
        method = self._on_handle(method_name)
        started = self._started
        call = None if started is None else started.begin(method, len(workers), payloads.stored)
        refs: list[Any] = []
        for rank, (worker, (positional, named)) in enumerate(zip(workers, arguments, strict=True)):
            if call is not None and call.trace:
                nbytes = payloads.nbytes(column[rank] for column in columns)
                named[TRACED] = call.trace, call.number, nbytes
            refs.append(self._execute_remote_single_worker(worker, method_name, *positional, **named))
        if started is not None and call is not None:
            started.sent(call, refs)
            self._made.last = call, refs
        return refs

    def _wait(self, output: Any) -> Any:
        """Return the values of references. A tracked call raises one error for all its ranks."""
        call = self._call_of(output)
        if call is None:
            return ray.get(output)
        values = call.result(None)
        return values if isinstance(output, list) else values[0]

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, by rank."""
        return self._worker_names

    @property
    def workers(self) -> list[Any]:
        """The actors' handles, by rank."""
        return self._workers

    @property
    def master_address(self) -> str | None:
        """Address of the ranks' rendezvous."""
        return self._master_addr

    @property
    def master_port(self) -> str | None:
        """Port of the ranks' rendezvous."""
        return self._master_port

    def __getattr__(self, name: str) -> Any:
        cls = self.__dict__.get("ray_cls_with_init")
        known = cls is not None and hasattr(_unwrap_ray_remote(cls.cls), name)
        advice = (
            f'; the class has it without @register: use execute_all_sync("{name}", ...), or register it'
            if known
            else ""
        )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self._state(), list(self.wg_dict or ()))

    def _state(self) -> dict[str, Any]:
        """Return the attributes that are copied to other groups of the same workers."""
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in _OF_THIS_PROCESS and not isinstance(value, WorkerGroup | GroupMethod)
        }


def _rebuild(cls: type[Any], state: dict[str, Any], roles: list[str]) -> Any:
    """Return a group of the workers in ``state``, which it does not own."""
    group = cls.__new__(cls)
    group.__dict__.update(
        state,
        _connection=Connection(),
        wg_dict=None,
        _started=None,
        _made=threading.local(),
    )
    group._bind_methods()
    if roles:
        group.fuse(roles)
    return group
