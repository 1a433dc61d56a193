"""Selections: the ranks and the role of a group that calls go to; and plans of such calls."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.calls.in_flight import loads
from phalanx.collect.message import rank_list
from phalanx.config import as_integer, is_whole
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.modes import plan, plan_one, rank_sets
from phalanx.dispatch.plan import CallPlan, Materialize, Target, result_of
from phalanx.errors import DispatchError, PhalanxError, StaleEpoch
from phalanx.group.group import Group
from phalanx.members.meshes import mesh_of
from phalanx.topology.mesh import Mesh
from phalanx.wire.messages import RUN
from phalanx.wire.value import Value

Which = Literal["all", "one", "any", "process"]


@dataclass(frozen=True, eq=False)
class Selection:
    """Ranks of a group that calls go to, in a single role.

    ``fixed`` are the ranks if the selection is a part of the group; None: all ranks that the group has at the time.
    ``which``: a call goes to "all" ranks; to the "one" selected rank; to "any" rank, the least busy; or to the selected
    "process", never with peers. With "one" and "any", a method with a mesh mode runs on all ranks of the dp coordinate.
    Except for "all", the output of the rank is the value of the call.

    ``pin(loads, processes)`` chooses the rank in place of the least busy rank, given the calls in flight on each living
    rank (or dp coordinate, by its first rank) and the processes by rank.
    """

    core: Group
    fixed: tuple[int, ...] | None = None
    role: str = ""
    which: Which = "all"
    pin: Callable[[Mapping[int, int], Sequence[object]], int] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The selected ranks; for a complete group, its current ranks."""
        return self.core.epoch.everyone if self.fixed is None else self.fixed

    @property
    def name(self) -> str:
        """Name of the group, or ``group.role`` if the selection is a role."""
        return f"{self.core.name}.{self.role}" if self.role else self.core.name

    @property
    def methods(self) -> Mapping[str, MethodSpec]:
        """The registered methods by name."""
        return self.core.handle.methods.get(self.role, {})

    @property
    def part(self) -> tuple[int, ...] | None:
        """The selected ranks, or None if they are all ranks of the group in order."""
        return None if self.fixed is None or self.fixed == self.core.epoch.everyone else self.fixed

    @property
    def world_size(self) -> int:
        """Number of ranks of the complete group, over which its meshes are defined."""
        return self.core.epoch.size

    def mesh(self, name: str = "default") -> Mesh:
        """Return a mesh of the group.

        Raises:
            DispatchError: if the group has no mesh of that name.
        """
        return mesh_of(self.core, name)

    def at(self, key: int | slice) -> Selection:
        """Return the selection of the rank at index ``key`` of the selected ranks, or of a slice of them.

        Raises:
            DispatchError: if there is no such rank, or the slice is empty.
        """
        count = len(self.ranks)
        if isinstance(key, slice):
            if not self.ranks[key]:
                raise DispatchError(f"{self.name}[{key!r}] is empty; the group has {count} ranks")
            return replace(self, fixed=self.ranks[key], which="all")
        if not is_whole(key) or not -count <= key < count:
            raise DispatchError(
                f"{self.name}[{key!r}]: expected a rank from {-count} to {count - 1}, or a slice such as [0:2]"
            )
        return replace(self, fixed=(self.ranks[key],), which="one")

    def spec_of(self, name: str) -> MethodSpec:
        """Return the specification of a method. An unregistered method gets the same arguments on every rank.

        Raises:
            AttributeError: if the class has no such method.
        """
        spec = self.methods.get(name)
        if spec is not None:
            return spec
        known = self.core.handle.callables.get(self.role, frozenset[str]())
        if name not in known and "__getattr__" not in known:
            where = self.core.handle.classes.get(self.role)
            if where is None:
                raise AttributeError(self._whose(name))
            raise AttributeError(
                f"{self.name}: class {where} has no method {name!r}"
                + "".join(f"; did you mean {near!r}?" for near in difflib.get_close_matches(name, known, n=1))
            )
        return MethodSpec(name)

    def _whose(self, name: str) -> str:
        """Return the error message for a name that was looked up in a group with roles, or its ranks, not in a role."""
        roles = self.core.handle.callables
        having = sorted(role for role, known in roles.items() if name in known)
        text = f"{self.name} has no role {name!r}; its roles are: {', '.join(roles)} (a rank: group.{min(roles)}[0])"
        if not having:
            return f"{text}. None of them has a method {name!r}"
        return f"{text}. Call {' or '.join(f'group.{role}.call({name!r}, ...)' for role in having)}"

    def unknown(self, name: str) -> str:
        """Return the error message for a missing attribute, with advice or similar names."""
        if self.role not in self.core.handle.classes:
            return self._whose(name)
        methods, text = sorted(self.methods), f"{self.name} has no registered method {name!r}"
        if name in self.core.handle.callables[self.role]:
            advice = f'use group.call("{name}", ...), or register it'
            return f"{text}; the class has it without @px.register: {advice}"
        near = " or ".join(map(repr, difflib.get_close_matches(name, methods, n=3)))
        return f"{text}; did you mean {near}?" if near else f"{text}; it has: {', '.join(methods)}"

    def plan(
        self,
        spec: MethodSpec,
        handle: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        materialize: Materialize = result_of,
    ) -> CallPlan:
        """Return the plan of a call by the method's mode. Custom functions get ``handle`` as the group.

        Raises:
            DispatchError: if the arguments do not fit the method or its mode.
            StaleEpoch: if the group was resized and no longer has the selected ranks.
        """
        if self.fixed is not None:
            self.check_there("run" if spec.name == RUN else spec.name, self.fixed)
        if self.which != "all":
            return self._plan_one(spec, args, kwargs)
        return plan(spec, self, args, kwargs, ranks=self.part, materialize=materialize, handle=handle)

    def check_there(self, method: str, ranks: Sequence[int]) -> None:
        """Check that the group still has these ranks.

        Raises:
            StaleEpoch: if the group was resized and has fewer ranks.
        """
        epoch = self.core.epoch
        if gone := [rank for rank in ranks if rank >= epoch.size]:
            raise StaleEpoch(
                f"{self.name}, {method}: ranks {gone} have left the group, which has {epoch.size} now; select ranks "
                "again, or call group.any",
                group=self.core.name,
                epoch=epoch.number,
                current=epoch.number,
            )

    def _plan_one(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        """Plan a call on a single rank or dp coordinate, with unchanged arguments and a single output as the value."""
        sets = rank_sets(spec, self)
        if self.which == "any":
            chosen = self._least_busy(spec, sets)
        else:
            chosen = next(ranks for ranks in sets if self.ranks[0] in ranks)
            if self.which == "process" and len(chosen) > 1:
                raise DispatchError(
                    f"{self.name}.rank({self.ranks[0]}).{spec.name}() [{spec.mode!r}]: ranks {list(chosen)} are one dp "
                    f"coordinate and meet in collectives, so a single rank would wait forever; call "
                    f"group[{self.ranks[0]}].{spec.name}(...), which calls all of them"
                )
        return plan_one(spec, self, args, kwargs, chosen)

    def _least_busy(self, spec: MethodSpec, sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        here = frozenset(self.ranks)
        whole = [ranks for ranks in sets if here.issuperset(ranks)]
        if not whole:
            raise DispatchError(
                f"{self.name}.any.{spec.name}() [{spec.mode!r}]: ranks {list(self.ranks)} contain no complete dp "
                "coordinate; call group.any of the group itself, or of a slice with all ranks of a coordinate"
            )
        busy = loads(self.core)
        load = {ranks: sum(busy[rank] for rank in ranks) for ranks in whole}
        if self.pin is not None:
            epoch = self.core.epoch
            living = frozenset(range(len(epoch.endpoints))).difference(epoch.dead(self.core.backend))
            alive = {ranks[0]: calls for ranks, calls in load.items() if living.issuperset(ranks)}
            if alive:  # else the call recovers the group, or raises its error
                first = self.pin(alive, epoch.endpoints)
                return next(ranks for ranks in whole if ranks[0] == first)
        return min(whole, key=load.__getitem__)  # the first of equal ones

    def chosen_ranks(
        self, verb: str, given: Value, error: type[PhalanxError] = DispatchError
    ) -> tuple[int, ...]:
        """Return the given rank, or the ranks without duplicates.

        Raises:
            PhalanxError: ``error``, if a rank is not in the selection, or no rank is given.
        """
        listed = given if isinstance(given, Iterable) and as_integer(given) is None else [given]
        named = set(map(as_integer, listed))
        ranks = tuple(rank for rank in self.ranks if rank in named)
        if not ranks or len(ranks) < len(named):
            raise error(f"{self.name}.{verb}: ranks {given!r}; expected {rank_list(self.ranks)}")
        return ranks
