"""``px.Worker``: the optional base class of workers, with information about their rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.declare.bind import BoundClass
from phalanx.declare.classes import registered_methods
from phalanx.declare.context import Siblings, WorkerContext, being_made, coordinates_of, note_context
from phalanx.declare.weight_declarations import accept, publish
from phalanx.errors import DeclarationError
from phalanx.topology.mesh import Mesh

if TYPE_CHECKING:
    import torch


#: Keys of ``WorkerContext.shared``: the function that :meth:`Worker.rejoin` calls; True while the worker is constructed
#: in place of a lost rank.
REJOIN = "rejoin"
REJOINING = "rejoining"


class Worker:
    """Base class of workers. Deriving from it is optional: it adds ``bind``, and attributes of the rank.

    Outside of a group (``Accumulator()`` in a unit test) a worker is rank 0 of 1, on the CPU.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A wrong declaration raises here, not at the first call. Not cached: a class decorator may register more.
        for name in registered_methods.__wrapped__(cls):
            if name in vars(Worker):
                raise DeclarationError(
                    f"{cls.__name__}.{name}: a registered method may not be called {name!r}, because self.{name} of a "
                    "px.Worker would then be the method; rename it, or do not derive from px.Worker"
                )

    @classmethod
    def bind(cls, *args: Any, **kwargs: Any) -> BoundClass:
        """Return this class with the arguments of its constructor, for ``px.WorkerGroup`` and ``px.colocate``."""
        return BoundClass(cls, *args, **kwargs)

    @property
    def _context(self) -> WorkerContext:
        context = self.__dict__.get("_phalanx_context")
        if context is None:
            context = being_made.get() or WorkerContext()
            self.__dict__["_phalanx_context"] = context
        return context

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_phalanx_context"}

    @property
    def rank(self) -> int:
        """This worker's rank in its group, from 0."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._context.world_size

    @property
    def local_rank(self) -> int:
        """Rank within its block of the pool (the slots reserved together on a node), from 0."""
        return self._context.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks in the same block of the pool."""
        return self._context.local_world_size

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._context.group

    @property
    def role(self) -> str:
        """Name of this worker's role if several roles share the process, else ""."""
        return self._context.role

    @property
    def roles(self) -> Siblings:
        """The roles in this process by name: ``self.roles["critic"]``."""
        return self._context.roles

    @property
    def rejoining(self) -> bool:
        """True if this worker is constructed in place of a lost rank of a running group (``px.replace_ranks``).

        The other ranks run :meth:`rejoin` at the same time, so the constructor must run the same collectives, in the
        same order.
        """
        return bool(self._context.shared.get(REJOINING))

    def rejoin(self) -> None:
        """Form the process groups again with replaced ranks, whose constructors run now. Called on the other ranks.

        The previous process groups are already destroyed. This method recreates the default group, with its previous
        backend and timeout, and wraps the ``DistributedDataParallel`` attributes of the worker again. Override it if
        the constructor creates other groups, device meshes or sharded modules, with the same collectives in the same
        order as in the constructor. The state is restored afterwards, from ``px.snapshot``.
        """
        again = self._context.shared.get(REJOIN)
        if again is not None:
            again(self)

    @property
    def device(self) -> torch.device:
        """Device of this rank: its accelerator if the slot has a real accelerator, else the CPU."""
        import torch

        context = self._context
        if context.device_type != "cpu":
            module = getattr(torch, context.device_type, None)
            if module is not None and module.is_available():
                return torch.device(context.device_type, context.local_device)
        return torch.device("cpu")  # also for px.init(num_gpus=8) on a machine without accelerators

    def mesh(self, name: str = "default") -> Mesh:
        """Return a mesh that was given to the group as ``mesh=``.

        Raises:
            DeclarationError: if the group was given no mesh of that name.
        """
        meshes = self._context.meshes
        if name not in meshes:
            raise DeclarationError(
                f"group {self.group_name!r} was given no mesh {name!r} (it has: {sorted(meshes)}); pass "
                "mesh=px.Mesh(dp=..., tp=...) or mesh={name: px.Mesh(...)} to px.WorkerGroup"
            )
        return meshes[name]

    def register_mesh(self, name: str, mesh: Any) -> None:
        """Register this rank's coordinates in a mesh that the worker created, for ``Dispatch.mesh(name)``.

        Args:
            name: name of the mesh in the dispatch mode.
            mesh: a torch ``DeviceMesh`` with named dims, a ``px.Mesh`` over the group's ranks, this rank's coordinates
                as a dict such as ``{"dp": 0, "tp": 1}``, or a function that returns any of these when the group first
                needs the mesh (None as long as the mesh does not exist).

        Raises:
            DeclarationError: if ``mesh`` has another type, or is a DeviceMesh without named dims or without this rank.
        """
        self._context.registered[name] = mesh if callable(mesh) else coordinates_of(mesh, self.rank)

    publish_weights = publish
    """Publish the weights of a model as a source of syncs; see :func:`phalanx.weights.publish`."""

    accept_weights = accept
    """Accept weights from syncs into a model, or by a function; see :func:`phalanx.weights.accept`."""


def make(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], context: WorkerContext) -> Any:
    """Return ``cls(*args, **kwargs)``, whose context is set before its constructor runs, for all threads."""
    token = being_made.set(context)
    try:
        if not issubclass(cls, Worker) or type(cls).__call__ is not type.__call__:
            made: Any = cls(*args, **kwargs)
        else:  # as type.__call__, but with the context before __init__
            made = cls.__new__(cls, *args, **kwargs)
            if isinstance(made, cls):
                made.__dict__["_phalanx_context"] = context
                type(made).__init__(made, *args, **kwargs)
    finally:
        being_made.reset(token)
    if isinstance(made, Worker):
        made.__dict__.setdefault("_phalanx_context", context)
    else:
        note_context(made, context)
    check: Callable[[], None] | None = getattr(made, "__phalanx_made__", None)
    if check is not None:  # checks that constructors of every subclass must pass
        check()
    return made
