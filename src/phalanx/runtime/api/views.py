"""What can be called: a group, some of its ranks, one rank, one role of it."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from phalanx.declare.modes import Execute
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, GatherPlan, Same
from phalanx.dispatch.planner import plan, plan_execute_all, plan_execute_rank_zero
from phalanx.errors import DeclarationError, DispatchError
from phalanx.runtime.api.methods import BoundMethod, Planner
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.groups.core import GroupCore
from phalanx.topology.mesh import Mesh
from phalanx.tracing.recorder import tracing
from phalanx.wire.messages import RUN

if TYPE_CHECKING:
    from phalanx.runtime.tools.profile import Profile
    from phalanx.runtime.tools.record import Record

P = ParamSpec("P")
R = TypeVar("R")


class GroupView:
    """Ranks of a group that calls go to. Registered methods are attributes."""

    def __init__(
        self,
        core: GroupCore,
        ranks: Sequence[int],
        role: str = "",
        *,
        single: bool = False,
        choose: bool = False,
    ) -> None:
        self._core = core
        self._ranks = tuple(ranks)
        self._role = role
        self._single = single  # one rank, whose output is the value
        self._choose = choose  # one call to whichever rank is least busy
        self._bound: dict[str, BoundMethod[..., Any]] = {}

    @property
    def core(self) -> GroupCore:
        """The shared part of the group."""
        return self._core

    @property
    def name(self) -> str:
        """Name of the group, with the role after a dot where this is a role of it."""
        return f"{self._core.name}.{self._role}" if self._role else self._core.name

    @property
    def role(self) -> str:
        """Name of the role; empty for a group of one class."""
        return self._role

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that calls go to."""
        return self._ranks

    @property
    def world_size(self) -> int:
        """Number of ranks that calls go to; what custom dispatch functions see."""
        return len(self._ranks)

    @property
    def methods(self) -> Mapping[str, MethodSpec]:
        """The registered methods by name."""
        return dict(self._core.record.methods.get(self._role, {}))

    def mesh(self, name: str = "default") -> Mesh:
        """The group's mesh of that name: given to the group, or registered by its workers.

        Raises:
            DispatchError: there is none of that name.
        """
        return self._core.mesh(name)

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[GroupView]:
        return (self[index] for index in range(len(self._ranks)))

    def __getitem__(self, key: int | slice) -> GroupView:
        """One rank, which gives its value itself, or a slice of them, which gives a list."""
        if isinstance(key, slice):
            ranks = self._ranks[key]
            if not ranks:
                raise DispatchError(
                    f"{self.name}[{key.start}:{key.stop}] is empty; the group has {len(self)} ranks"
                )
            return GroupView(self._core, ranks, self._role)
        if (
            isinstance(key, bool)
            or not isinstance(key, int)
            or not -len(self._ranks) <= key < len(self._ranks)
        ):
            raise DispatchError(
                f"{self.name}[{key!r}]: expected a rank from {-len(self)} to {len(self) - 1}, or a slice such as [0:2]"
            )
        return GroupView(self._core, (self._ranks[key],), self._role, single=True)

    @property
    def any(self) -> GroupView:
        """For one call to the rank with the fewest calls under way; gives that rank's value."""
        return GroupView(self._core, self._ranks, self._role, choose=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        bound = self.__dict__.get("_bound", {}).get(name)
        if bound is None:
            spec = self.__dict__["_core"].record.methods.get(self.__dict__["_role"], {}).get(name)
            if spec is None:
                raise AttributeError(self._unknown(name))
            bound = self._bind(spec)
            self._bound[name] = bound
        return bound

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def _unknown(self, name: str) -> str:
        methods = sorted(self.methods)
        near = difflib.get_close_matches(name, methods, n=3)
        text = f"{self.name} has no registered method {name!r}"
        if name in self._core.record.callables.get(self._role, ()):
            return (
                text
                + f'; the class has it without @px.register: use group.call("{name}", ...), or register it'
            )
        return text + (
            f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; it has: {', '.join(methods)}"
        )

    def _spec_of(self, name: str) -> MethodSpec:
        spec = self.methods.get(name)
        if spec is not None:
            return spec
        known = self._core.record.callables.get(self._role, frozenset[str]())
        if name not in known and "__getattr__" not in known:
            raise AttributeError(
                f"{self.name}: class {self._core.record.classes.get(self._role)} has no method {name!r}"
                + "".join(f"; did you mean {near!r}?" for near in difflib.get_close_matches(name, known, n=1))
            )
        return MethodSpec(name)

    def _bind(self, spec: MethodSpec) -> BoundMethod[..., Any]:
        return BoundMethod(self, spec, self._planner(spec), chooses=self._choose)

    def _planner(
        self, spec: MethodSpec, materialize: Callable[[CallFuture[Any]], Any] | None = None
    ) -> Planner:
        if self._single or self._choose:
            return lambda args, kwargs: self._plan_one(spec, args, kwargs)
        return lambda args, kwargs: plan(
            spec, self._target(), args, kwargs, ranks=self._part(), materialize=materialize or _result
        )

    def _target(self) -> Any:
        return self._whole() if self._part() is not None else self

    def _whole(self) -> GroupView:
        return GroupView(self._core, range(self._core.world_size), self._role)

    def _part(self) -> tuple[int, ...] | None:
        whole = self._ranks == tuple(range(self._core.world_size))
        return None if whole else self._ranks

    def _plan_one(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        """One rank, arguments as they are, its output the value."""
        rank = self._core.least_busy(self._ranks) if self._choose else self._ranks[0]
        return plan_execute_rank_zero(self._whole(), args, kwargs, spec=spec, ranks=(rank,))

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method by name, registered or not (one that is not gets the same arguments on every rank)."""
        return self._named(method)(*args, **kwargs)

    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """As :meth:`call`, but returns at once with the future."""
        return self._named(method).submit(*args, **kwargs)

    def _named(self, method: str) -> BoundMethod[..., Any]:
        return self._bind(self._spec_of(method))

    @overload
    def method(self, function: Callable[Concatenate[Any, P], R], /) -> BoundMethod[P, Any]: ...
    @overload
    def method(self, function: str, /) -> BoundMethod[..., Any]: ...
    def method(self, function: Any, /) -> BoundMethod[..., Any]:
        """The typed handle of a method: ``group.method(Accumulator.add)`` takes what ``add`` takes."""
        name = function if isinstance(function, str) else getattr(function, "__name__", None)
        if not isinstance(name, str):
            raise DeclarationError(
                f"group.method({function!r}): expected a method of the worker class, such as Cls.add"
            )
        return self._named(name)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(worker, *args, **kwargs)`` on every rank; any function, lambdas and closures included.

        In a group of several roles, ``worker`` is the mapping of role names to instances.

        Returns:
            The outputs by rank; of ``group[i].run(...)`` the one output.
        """
        began = _now_if_traced()
        if not callable(function):
            raise DispatchError(f"{self.name}.run({function!r}): expected a function that takes the worker")
        spec = MethodSpec(RUN)
        if self._single or self._choose:
            plan_ = self._plan_one(spec, (function, *args), kwargs)
        else:
            same = {name: Same(value) for name, value in kwargs.items()}
            given = tuple(map(Same, (function, *args)))
            plan_ = CallPlan(self._ranks, given, same, GatherPlan("list", range(len(self._ranks))))
        return self._core.send(plan_, spec, self._role, None, self, began=began).result()

    def profile(
        self,
        ranks: Sequence[int] | None = None,
        calls: int = 1,
        *,
        methods: Sequence[Any] | None = None,
        folder: str | Path | None = None,
        tool: Literal["torch", "nsys"] = "torch",
        activities: Sequence[Literal["cpu", "cuda"]] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> Profile:
        """Profile the next calls on some ranks: one trace for each rank, brought to this machine.

        Calls are those that users make through the group, blocking or submitted, ``group.run`` included. The trace
        has a range named after the method around each.

        Example::

            with group.profile(ranks=[0], calls=3) as profile:
                for batch in batches:
                    group.update(batch)
            print(profile.paths)

        Args:
            ranks: of the group; the first one if not given.
            calls: how many of the next calls. The profiler starts with the first and stops after the last.
            methods: only calls of these, by name ("update", "actor.update") or as ``Cls.update``; default any.
            folder: for the traces; made if it is not there. Default a new one in the folder for temporary files.
            tool: "torch": torch.profiler; "nsys": Nsight Systems, for a group started with
                ``runtime_env=px.nsight()``.
            activities: "cpu", "cuda"; default what the rank has.
            record_shapes, profile_memory, with_stack, with_flops: as torch.profiler.profile takes them.

        Raises:
            DispatchError: no such rank or method.
            DeclarationError: the group is asynchronous, the tool or an activity is not to be had on a rank, or another
                profile is under way there.
        """
        from phalanx.runtime.tools.profile import start_profile

        options = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        return start_profile(self, ranks, calls, methods, folder, tool, activities, options)

    def record(
        self,
        path: str | Path,
        rank: int | None = None,
        method: Any = None,
        calls: int = 1,
        *,
        when: Literal["call", "error"] = "call",
        state: bool = False,
    ) -> Record:
        """Store the next calls of one rank with their inputs, for ``px.replay`` and ``phalanx replay``.

        The file has all that is needed to run them alone: the class with its arguments, the rank's place and
        variables, and the arguments as the method got them: its rows, futures resolved to values.

        Example::

            with group.record("call.pkl", rank=3, when="error"):
                group.update(batch)  # raises
            # $ phalanx replay call.pkl --pdb

        Args:
            path: of the file, on this machine.
            rank: of the group; the first one if not given.
            method: only calls of this one, by name or as ``Cls.update``; default any.
            calls: how many.
            when: "call": the next ones; "error": the next ones that raise an exception.
            state: store the worker's state before the call too: its ``state_dict()`` where it also has
                ``load_state_dict``, else the pickled object, for which no constructor is run on replay.

        Raises:
            DispatchError: no such rank or method.
            DeclarationError: another process owns the group.
        """
        from phalanx.runtime.tools.record import start_recording

        return start_recording(self, path, rank, None if method is None else [method], calls, when, state)

    def execute_all_sync(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks and wait: outputs by rank.

        Arguments are dealt out, one element per rank, when every one of them is a list of world_size elements;
        otherwise all ranks get the same.
        """
        return self.execute_all_async(method, *args, **kwargs).result()

    def execute_all_async(self, method: str, /, *args: Any, **kwargs: Any) -> CallFuture[list[Any]]:
        """As :meth:`execute_all_sync`, but returns at once with the future."""
        began = _now_if_traced()
        spec = self._spec_of(method)
        plan_ = plan_execute_all(self._target(), args, kwargs, spec=spec, ranks=self._part())
        return self._core.send(plan_, spec, self._role, None, self, began=began)

    def execute_all(self, method: str, /, *args: Any, **kwargs: Any) -> CallFuture[list[Any]]:
        """The same as :meth:`execute_all_async`."""
        return self.execute_all_async(method, *args, **kwargs)

    def execute_rank_zero_sync(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method on rank 0 only, with the arguments as they are, and wait: its value."""
        return self.execute_rank_zero_async(method, *args, **kwargs).result()

    def execute_rank_zero_async(self, method: str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """As :meth:`execute_rank_zero_sync`, but returns at once with the future."""
        began = _now_if_traced()
        spec = replace(self._spec_of(method), execute=Execute.RANK_ZERO)
        plan_ = plan_execute_rank_zero(self._target(), args, kwargs, spec=spec, ranks=self._part())
        return self._core.send(plan_, spec, self._role, None, self, began=began)

    def execute_rank_zero(self, method: str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """The same as :meth:`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method, *args, **kwargs)

    def __repr__(self) -> str:
        ranks = f"{len(self)} ranks" if self._part() is None else f"ranks {list(self._ranks)}"
        return f"<{type(self).__name__} {self.name}: {ranks}>"

    def __reduce__(self) -> Any:
        return _rebuild, (self._core.portable(), self._ranks, self._role, self._single, self._choose)


def _now_if_traced() -> int:
    return time.time_ns() if tracing.recorder is not None else 0


def _result(future: CallFuture[Any]) -> Any:
    return future.result()


def _rebuild(portable: Any, ranks: tuple[int, ...], role: str, single: bool, choose: bool) -> GroupView:
    from phalanx.runtime.groups.travel import unpack

    return GroupView(unpack(portable), ranks, role, single=single, choose=choose)
