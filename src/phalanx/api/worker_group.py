"""``px.WorkerGroup``: workers that are started on a pool and called together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from phalanx.api.selection import Selection
from phalanx.api.view import GroupView
from phalanx.debug.trace import from_environment
from phalanx.declare.bind import BoundClass, Colocation, WorkerClass, roles_of
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError
from phalanx.group.epoch import GroupHandle
from phalanx.group.group import Group
from phalanx.group.options import GroupOptions, ReplacePolicy, RestartPolicy, checked_options
from phalanx.group.preemption_notices import PreemptionNotice
from phalanx.members import processes
from phalanx.members.meshes import known_meshes
from phalanx.pools.pool import ResourcePool
from phalanx.session.session import session
from phalanx.topology.mesh import Mesh, axes_text


class WorkerGroup(GroupView):
    """A group with a worker per slot of a pool: ``WorkerGroup(pool, Accumulator.bind(start=1.0))``.

    Registered methods of the class are attributes of the group. With ``px.colocate({...})`` in place of a class, the
    roles are attributes: ``group.actor.update(batch)``.

    Args:
        pool: pool on whose slots the ranks run; rank ``r`` runs on slot ``r``.
        cls: a class, ``Cls.bind(...)``, or ``px.colocate({...})``.
        mesh: ``px.Mesh(...)`` over the ranks (named "default"), or a dict of meshes by name.
        name: name in tables and errors, and for ``px.attach``; default: derived from the class.
        env: environment variables of every rank, set before the user's modules are imported.
        runtime_env: Ray's runtime_env, for files and packages that a process needs before it starts (slower, since no
            process is reused).
        num_cpus: cores to reserve per rank on the node of its slot, in addition to the slot.
        memory: bytes of memory to reserve in the same way.
        resources: other resources of Ray to reserve in the same way, by name.
        start_timeout: seconds within which all constructors must return.
        call_timeout: deadline of each call in seconds; ``.options(timeout=...)`` overrides it.
        stall_report_after: seconds after which a running call is reported, with stacks; the call continues.
        on_failure: ``px.RestartPolicy(...)``: the next call restarts a broken group; ``px.ReplacePolicy(...)``: it
            replaces only the lost ranks.
        max_concurrency: number of calls that interleave at awaits on a rank, which makes the ranks asynchronous; None:
            the value of the class (engines: 10,000), else a rank runs a call at a time.
        on_notice: function that is called with each ``px.PreemptionNotice`` for ranks of the group, on a thread of the
            library. It may set flags or submit calls, and must not wait. ``px.preemption_notices(group)`` returns the
            notices too.
        visible_devices: "own": a rank sees its own devices; "node": all devices of the group on its node.
        detached: True if the group outlives this driver; needs ``name`` and a detached pool.
        show_ranks: ranks whose output this driver shows: "all", "merged" (all, but equal lines of several ranks only
            once), "none", a rank or a list of ranks; default: the value given to ``px.init``, else rank 0. The output
            of every rank is also in a file of its own.

    Raises:
        DeclarationError: if the declaration of the class or an option is invalid.
        PlacementError: if no share of a slot is free, or processes or extra resources are not available.
        WorkerInitError: if a constructor raises; also an instance of the raised exception. The group is removed.
        CallTimeout: if not all constructors return within ``start_timeout``.
    """

    def __init__(
        self,
        pool: ResourcePool,
        cls: WorkerClass | Colocation,
        *,
        mesh: Mesh | Mapping[str, Mesh] | None = None,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        num_cpus: float | None = None,
        memory: float | None = None,
        resources: Mapping[str, float] | None = None,
        start_timeout: float | None = None,
        call_timeout: float | None = None,
        stall_report_after: float | None = None,
        on_failure: RestartPolicy | ReplacePolicy | None = None,
        on_notice: Callable[[PreemptionNotice], object] | None = None,
        max_concurrency: int | None = None,
        visible_devices: Literal["own", "node"] = "own",
        detached: bool = False,
        show_ranks: str | int | Sequence[int] | None = None,
    ) -> None:
        if not isinstance(pool, ResourcePool):
            raise DeclarationError(
                f"WorkerGroup(pool={pool!r}): expected a px.ResourcePool, such as px.ResourcePool([4])"
            )
        bound = roles_of(cls)
        given = {
            "name": name,
            "env": env,
            "runtime_env": runtime_env,
            "num_cpus": num_cpus,
            "memory": memory,
            "resources": resources,
            "start_timeout": start_timeout,
            "call_timeout": call_timeout,
            "stall_report_after": stall_report_after,
            "on_failure": on_failure,
            "on_notice": on_notice,
            "max_concurrency": max_concurrency,
            "visible_devices": visible_devices,
            "detached": detached or None,
            "show_ranks": show_ranks,
        }
        options = checked_options(mesh, pool.world_size, given)
        for one in bound.values():
            options = options.with_ray_options(one.ray_options)
        from_environment()
        self._start(pool, bound, options)

    def _start(self, pool: ResourcePool, bound: Mapping[str, BoundClass], options: GroupOptions) -> None:
        if options.detached and not all(holding.detached for holding in pool.holdings.values()):
            raise DeclarationError(
                "WorkerGroup(detached=True) on a pool that ends with this driver; make it with "
                "px.ResourcePool(..., detached=True)"
            )
        pool.repair(
            options.start_timeout, idle=True
        )  # no rank can start on a node that was lost or is drained
        self.number = next(session.group_numbers)
        core = Group(self._handle(pool, bound, options), pool.backend_api, pool.world_size, owner=True)
        core.pool, core.tenant, core.has_pool = pool, self, True
        core.roles, core.options = bound, options
        core.spare = isinstance(options.on_failure, ReplacePolicy)
        session.add_group(core)
        GroupView.__init__(self, Selection(core))
        pool.claim(self)
        try:
            processes.start(core)
        except BaseException as error:
            was_closed = not core.begin_close()
            processes.close(core, 0.0)
            if was_closed and isinstance(error, Exception):
                raise processes.closed_while(core.name, "be started") from error
            raise

    def _handle(
        self, pool: ResourcePool, bound: Mapping[str, BoundClass], options: GroupOptions
    ) -> GroupHandle:
        classes = {role: one.cls for role, one in bound.items()}
        default = "_".join(cls.__name__ for cls in classes.values()) + f"-{self.number}"
        return GroupHandle(
            name=options.name or default,
            number=self.number,
            methods={role: dict(one.methods) for role, one in bound.items()},
            callables={
                role: frozenset(n for n in dir(cls) if _is_callable(cls, n)) for role, cls in classes.items()
            },
            classes={role: cls.__name__ for role, cls in classes.items()},
            meshes=dict(options.meshes),
            call_timeout=options.call_timeout,
            stall_report_after=options.stall_report_after,
            pool=pool.name,
            detached=options.detached,
            asynchronous=options.max_concurrency is not None,
            independent=all(getattr(cls, "independent", False) is True for cls in classes.values()),
        )

    def restart(self) -> None:
        """Restart the group on its slots: new processes, the same handles, the next epoch.

        Each worker is constructed with the same arguments. Then the calls of methods registered with
        ``rerun_on_restart=True`` are repeated in order (the last successful call of each method). Ranks whose node was
        lost move to other nodes. Futures of earlier calls fail with ``StaleEpoch``. Weights are not synced again:
        methods that need weights raise ``WeightsTorn`` until the next sync.

        Raises:
            GroupClosed: if the group is closed.
            PlacementError: if a node was lost and the other nodes have no capacity.
            WorkerInitError, RemoteCallError, CallTimeout: if a constructor or a repeated call fails, or takes too long.
                The group stays broken, and ``restart()`` may be called again.
        """
        processes.restart(self.core)

    @property
    def pool(self) -> ResourcePool:
        """Pool on which the group runs."""
        return self.core.pool

    @property
    def roles(self) -> tuple[str, ...]:
        """The role names of a colocated group; empty for a group of a single class."""
        return tuple(role for role in self.core.roles if role)

    @property
    def state(self) -> str:
        """ "starting", "ready", "broken", "restarting", "closing" or "closed"."""
        return self.core.lifecycle.state.value

    @property
    def closed(self) -> bool:
        """True if the group takes no calls because it was closed."""
        return self.core.closed

    @property
    def epoch(self) -> int:
        """Number of the current epoch, which grows with each restart, replacement and step of a resize."""
        return self.core.epoch.number

    def spawn(self) -> dict[str, GroupView]:
        """Return the roles of a colocated group by name. Each can be used like a group.

        Raises:
            DeclarationError: if the group was not created with ``px.colocate``.
        """
        if not self.roles:
            raise DeclarationError(
                f"{self.name} has a single class; spawn() gives the roles of px.colocate({{...}})"
            )
        return {role: getattr(self, role) for role in self.roles}

    def explain(self) -> Table:
        """Return a table of where each rank runs: node, accelerator and share of it, process, roles and mesh."""
        rows: list[tuple[Any, ...]] = []
        for rank, endpoint in enumerate(self.core.endpoints):
            facts = endpoint.facts
            holding = self.pool.holdings[endpoint.slot.pool]
            accelerator = holding.accelerator_text(endpoint.slot) or "CPU"
            place = (rank, facts.slot.host, facts.slot.node_id[:8], accelerator)
            roles = list(self.roles) or self.core.handle.classes[""]
            share = f"1/{holding.max_colocate_count}"
            rows.append((*place, share, facts.pid, roles, self._coordinates(rank)))
        columns = ("rank", "host", "node", "accelerator", "share", "pid", "roles in the process", "mesh")
        title = f"group {self.name}: {len(rows)} ranks, {self.state}"
        return Table(title, columns, tuple(rows), self._notes())

    def _coordinates(self, rank: int) -> str | None:
        texts: list[str] = []
        for name, mesh in known_meshes(self.core).items():
            if rank < mesh.world_size:  # otherwise it leaves, or has just joined
                axes = axes_text(mesh.coordinates(rank))
                texts.append(axes if name == "default" else f"{name}: {axes}")
        return "; ".join(texts) or None

    def _notes(self) -> tuple[str, ...]:
        notes: list[str] = []
        if self.roles:
            notes.append(f"colocated in one process per rank: {', '.join(self.roles)}")
        others = [one.name for one in self.pool.groups if one.number != self.number]
        if others:
            notes.append(f"on the same slots, as processes of their own: {', '.join(others)}")
        if self.core.snapshot is not None:
            notes.append(str(self.core.snapshot))
        return tuple(notes)

    def statistics(self) -> dict[str, int]:
        """Return counts of this process's calls since the group was created.

        ``calls`` and ``failed`` calls; ``sent_bytes`` in messages to all ranks, ``stored_bytes`` in the object store,
        ``fetched_bytes`` of results that this process read. ``px.debug.statistics()`` has the counts of all groups.
        """
        return self.core.counts.as_dict()

    def close(self) -> None:
        """End the group: run each worker's own ``close()``, then end the processes. Idempotent.

        The slots stay in the pool. Calls in flight fail with ``GroupClosed``.
        """
        if self.core.begin_close():
            processes.close(self.core)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


def _is_callable(cls: type, name: str) -> bool:
    if name.startswith("__") and name != "__getattr__":
        return False
    return callable(getattr(cls, name, None))
