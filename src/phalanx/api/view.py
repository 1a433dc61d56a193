"""Views of a group that calls go to: all ranks, some ranks, a single rank, or a role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, overload

from phalanx.api.methods import BoundMethod, StreamingMethod
from phalanx.api.selection import Selection
from phalanx.calls.future import CallFuture
from phalanx.debug.profile import Profile, start_profile
from phalanx.declare.dispatch_modes import Dispatch, Execute
from phalanx.declare.register import MethodSpec, Returns, Yields
from phalanx.dispatch.modes import dealt_or_same
from phalanx.errors import DeclarationError, DispatchError, GroupBroken
from phalanx.group.epoch import GroupHandle
from phalanx.group.group import Group
from phalanx.group.roster import Roster, publish
from phalanx.session.session import session
from phalanx.topology.mesh import Mesh
from phalanx.wire.messages import RUN
from phalanx.wire.value import Value

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
One = TypeVar("One")
Item = TypeVar("Item")


class GroupView:
    """Ranks of a group that calls go to. The registered methods are attributes of the view."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        if (selection.role, selection.fixed, selection.which) == ("", None, "all"):
            roles = filter(None, self.core.handle.methods)
            self.__dict__.update({role: GroupView(Selection(self.core, role=role)) for role in roles})
        self._bound: dict[str, BoundMethod[..., Any, Any]] = {}

    @property
    def core(self) -> Group:
        """State of the group, which all its views share."""
        return self._selection.core

    @property
    def name(self) -> str:
        """Name of the group, or ``group.role`` if the view is a role."""
        return self._selection.name

    @property
    def role(self) -> str:
        """Name of the role; "" for a group of a single class."""
        return self._selection.role

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that calls go to."""
        return self._selection.ranks

    @property
    def world_size(self) -> int:
        """Number of ranks that calls go to, also for custom dispatch functions."""
        return len(self._selection.ranks)

    @property
    def methods(self) -> Mapping[str, MethodSpec]:
        """The registered methods by name."""
        return dict(self._selection.methods)

    def mesh(self, name: str = "default") -> Mesh:
        """Return a mesh that was given to the group, or registered by its workers.

        Raises:
            DispatchError: if the group has no mesh of that name.
        """
        return self._selection.mesh(name)

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[RankView]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, key: int, /) -> RankView: ...
    @overload
    def __getitem__(self, key: slice, /) -> GroupView: ...
    def __getitem__(self, key: int | slice, /) -> GroupView:
        """Return a view of a rank, whose calls return the value of the rank, or a view of a slice of ranks.

        A method with a mesh mode is called on all ranks of rank i's dp coordinate by ``group[i]``.

        Raises:
            DispatchError: if there is no such rank, or the slice is empty.
        """
        chosen = self._selection.at(key)
        return GroupView(chosen) if chosen.which == "all" else RankView(chosen)

    @property
    def any(self) -> RankView:
        """View that sends each call to the rank with the fewest calls in flight and returns the value of this rank.

        A method with a mesh mode is called on all ranks of the dp coordinate with the fewest calls in flight.
        """
        return RankView(replace(self._selection, which="any"))

    def rank(self, index: int, /) -> RankView:
        """Return a view of a single process. Calls of methods whose mesh mode needs peers of the rank are refused.

        Raises:
            DispatchError: if there is no such rank.
        """
        return RankView(replace(self._selection.at(index), which="process"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        bound = self.__dict__.get("_bound", {}).get(name)
        if bound is None:
            spec = self.__dict__["_selection"].methods.get(name)
            if spec is None:
                raise AttributeError(self._selection.unknown(name))
            bound = self._bound[name] = self._bind(spec)
        return bound

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def _bind(self, spec: MethodSpec) -> BoundMethod[..., Any, Any]:
        kind = StreamingMethod if spec.streams else BoundMethod
        return kind(self._selection, spec, self)

    def call(self, method: str, /, *args: Value, **kwargs: Value) -> Value:
        """Call a method by name. A method that is not registered gets the same arguments on every rank.

        Raises:
            AttributeError: if the class has no such method.
        """
        return self._named(method)(*args, **kwargs)

    def submit(self, method: str, /, *args: Value, **kwargs: Value) -> CallFuture[Any]:
        """Send a call as :meth:`call`, and return at once with its future."""
        return self._named(method).submit(*args, **kwargs)

    def _named(self, method: str) -> BoundMethod[..., Any, Any]:
        return self._bind(self._selection.spec_of(method))

    @overload
    def method(
        self, function: Callable[Concatenate[Yields[V, Any, Item, Any], P], object], /
    ) -> StreamingMethod[P, V, Item]: ...
    @overload
    def method(
        self, function: Callable[Concatenate[Returns[V, Any], P], object], /
    ) -> BoundMethod[P, V, V]: ...
    @overload
    def method(self, function: Callable[Concatenate[R, P], object], /) -> BoundMethod[P, Any, Any]: ...
    @overload
    def method(self, function: str, /) -> BoundMethod[..., Any, Any]: ...
    def method(self, function: Value, /) -> Value:
        """Return the typed handle of a method: ``group.method(Accumulator.add)`` takes the arguments of ``add``.

        Type checkers know the type of the result from ``@px.register``: for ``ONE_TO_ALL``, a list of results of
        ``add``.

        Raises:
            DeclarationError: if ``function`` is not a method or a name.
            AttributeError: if the class has no such method.
        """
        name = function if isinstance(function, str) else getattr(function, "__name__", None)
        if not isinstance(name, str):
            raise DeclarationError(
                f"group.method({function!r}): expected a method of the worker class, such as Cls.add"
            )
        return self._named(name)

    def run(self, function: Callable[..., Any], *args: Value, **kwargs: Value) -> Value:
        """Run ``function(worker, *args, **kwargs)`` on every rank. Lambdas and closures are allowed.

        In a group of several roles, ``worker`` is a mapping from role names to instances.

        Returns:
            The list of outputs by rank; for ``group[i].run(...)``, the output of the rank.

        Raises:
            DispatchError: if ``function`` is not callable.
        """
        if not callable(function):
            raise DispatchError(f"{self.name}.run({function!r}): expected a function that takes the worker")
        return self._bind(MethodSpec(RUN))(function, *args, **kwargs)

    def profile(
        self,
        ranks: Sequence[int] | None = None,
        calls: int = 1,
        *,
        folder: str | Path | None = None,
        tool: Literal["torch", "nsys"] = "torch",
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> Profile:
        """Profile the next calls on some ranks. The trace of each rank is copied to this machine.

        Only calls of users through the group count (blocking or submitted, and ``group.run``). Each call is a range
        in the trace, named after its method.

        Example::

            with group.profile(ranks=[0], calls=3) as profile:
                for batch in batches:
                    group.update(batch)
            print(profile.paths)

        Args:
            ranks: ranks to profile; default: the first rank.
            calls: number of calls to profile. The profiler starts with the first call and stops after the last.
            folder: folder for the traces, created if it does not exist. Other traces in it are kept. Default: a new
                temporary folder.
            tool: "torch": torch.profiler; "nsys": Nsight Systems, for a group started with
                ``runtime_env=px.debug.nsight_environment()``.
            record_shapes, profile_memory, with_stack, with_flops: options of torch.profiler.profile.

        Raises:
            DispatchError: if there is no such rank.
            DeclarationError: if the group is asynchronous, a rank lacks the tool, or another profile is running there.
            OSError: if the folder cannot be created.
        """
        options = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        return start_profile(self._selection, ranks, calls, folder, tool, options)

    def execute_all_sync(self, method: str, /, *args: Value, **kwargs: Value) -> list[Any]:
        """Call a method on all ranks, wait, and return the outputs by rank.

        If every argument is a list of world_size elements, each rank gets its element; otherwise all ranks get the same
        arguments.
        """
        return self.execute_all_async(method, *args, **kwargs).result()

    def execute_all_async(self, method: str, /, *args: Value, **kwargs: Value) -> CallFuture[list[Any]]:
        """Send a call as :meth:`execute_all_sync`, and return at once with its future."""
        everyone = replace(self._selection, which="all")
        mode = dealt_or_same(len(self), [*args, *kwargs.values()])
        spec = replace(everyone.spec_of(method), mode=mode, execute=Execute.ALL)
        return BoundMethod(everyone, spec, self).submit(*args, **kwargs)

    execute_all = execute_all_async
    """Another name of :meth:`execute_all_async`, as in verl."""

    def execute_rank_zero_sync(self, method: str, /, *args: Value, **kwargs: Value) -> Value:
        """Call a method on rank 0 only, with unchanged arguments, wait, and return its value."""
        return self.execute_rank_zero_async(method, *args, **kwargs).result()

    def execute_rank_zero_async(self, method: str, /, *args: Value, **kwargs: Value) -> CallFuture[Any]:
        """Send a call as :meth:`execute_rank_zero_sync`, and return at once with its future."""
        everyone = replace(self._selection, which="all")
        spec = replace(everyone.spec_of(method), mode=Dispatch.RANK_ZERO)
        return BoundMethod(everyone, spec, self).submit(*args, **kwargs)

    execute_rank_zero = execute_rank_zero_async
    """Another name of :meth:`execute_rank_zero_async`, as in verl."""

    def __repr__(self) -> str:
        part = self._selection.part
        ranks = f"{len(self)} ranks" if part is None else f"ranks {list(part)}"
        return f"<{type(self).__name__} {self.name}: {ranks}>"

    def __reduce__(self) -> tuple[Any, ...]:
        chosen = self._selection
        return _rebuild, (pack(chosen.core), chosen.fixed, chosen.role, chosen.which, chosen.pin)


class RankView(GroupView):
    """A single rank of a group, or the least busy rank. Calls return the value of the rank."""

    @overload
    def method(
        self, function: Callable[Concatenate[Yields[Any, One, Any, Item], P], object], /
    ) -> StreamingMethod[P, One, Item]: ...
    @overload
    def method(
        self, function: Callable[Concatenate[Returns[Any, One], P], object], /
    ) -> BoundMethod[P, One, One]: ...
    @overload
    def method(self, function: Callable[Concatenate[R, P], object], /) -> BoundMethod[P, Any, Any]: ...
    @overload
    def method(self, function: str, /) -> BoundMethod[..., Any, Any]: ...
    def method(self, function: Value, /) -> Value:
        """Return the typed handle of a method, as :meth:`GroupView.method`."""
        return super().method(function)


class PortableGroup(NamedTuple):
    """A picklable group.

    ``run`` is the id of the run whose driver owns the group. An inline group has no ``roster``, and is found in the
    process of its driver only.
    """

    run: str
    backend: str
    handle: GroupHandle
    roster: Roster | None
    roster_key: str


def pack(core: Group) -> PortableGroup:
    """Return the picklable values from which another process creates a view of the group."""
    if core.backend.immediate:
        handle = GroupHandle(core.name, core.handle.number, {}, {}, {})  # methods may not be picklable
        return PortableGroup(session.run_id, core.backend.name, handle, None, "")
    if core.has_pool:
        core.pool.keep()  # for the remote view, even if no reference to the group is left here
    if not core.endpoints:
        with core.changing:  # wait for a restart in progress, which creates the endpoints
            pass
    if core.has_pool and not core.handle.detached and not core.roster_key:
        core.roster_key = f"roster/{session.run_id}/{core.handle.number}"
        publish(core)
    roster = replace(Roster.of(core), departed=frozenset())  # which are read again with a newer roster
    return PortableGroup(core.run, core.backend.name, core.handle, roster, core.roster_key)


def unpack(portable: PortableGroup) -> Group:
    """Return the group itself if this process owns it, else a new group state for views, which does not own the ranks.

    Raises:
        DeclarationError: if the group is inline and belongs to another process, or no longer exists.
    """
    run, backend_name, handle, roster, roster_key = portable
    if run == session.run_id and (own := session.own_group(handle.number)) is not None:
        return own  # so that ranks get the calls of all views of this process in the same order
    if roster is None:
        raise DeclarationError(
            f"group {handle.name!r} runs in the process of its driver (backend 'inline') and cannot be used in "
            "another one; use the ray backend"
        )
    endpoints = [replace(member) for member in roster.members]  # own copies, as ``retired`` is set
    backend = session.get_backend(backend_name)
    core = Group(handle, backend, len(endpoints), owner=False, number=roster.number)
    session.add_group(core)
    core.enter(endpoints)
    core.started()
    if not endpoints:
        text = f"group {handle.name!r} had no ranks when it was sent here: its restart had failed"
        core.broken(GroupBroken(text, group=handle.name))
    core.run, core.roster_key = run, roster_key
    core.is_view = core.spare = bool(roster_key)  # only the owner ends living ranks
    return core


def _rebuild(portable: PortableGroup, *chosen: Any) -> GroupView:
    selection = Selection(unpack(portable), *chosen)
    return GroupView(selection) if selection.which == "all" else RankView(selection)
