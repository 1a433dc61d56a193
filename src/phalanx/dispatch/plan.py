"""The plan of a call: the called ranks, their arguments, and how their outputs become the result.

Planning begins with a ``CallInput``: the arguments by name, checked against the method's signature.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from phalanx.declare.dispatch_modes import Collect, Mode
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.pytree import is_future, replaced
from phalanx.errors import DispatchError
from phalanx.topology.mesh import Mesh

#: Function that waits for a future and returns its result.
Materialize = Callable[[Any], Any]


def result_of(future: Any) -> Any:
    """Return the value of a future or of another value that is stored elsewhere."""
    settled = getattr(future, "settled", None)  # of a CallFuture, which may refuse to be an argument
    return future.result() if settled is None else settled()


@dataclass(frozen=True)
class Same:
    """An argument with the same value for every called rank; the value is encoded and stored once."""

    value: Any


@dataclass(frozen=True)
class Each:
    """An argument with a separate value for each called rank, aligned with ``CallPlan.ranks``.

    If ranks share a value (the same object), it is encoded and stored once.
    """

    values: Sequence[Any]


@dataclass(frozen=True)
class GatherPlan:
    """The conversion of outputs into the result of a call.

    Attributes:
        collect: ``"first"`` (the first taken output), ``"list"`` (the taken outputs), ``"join"`` (the taken outputs
            joined along dim 0), ``"none"``, or a function of (group, taken outputs).
        take: positions in ``CallPlan.ranks`` of the outputs to take, in order.
        trim: pairs (rows given to the rank, real rows among them) by taken position; None: no padding.
        order: permutation that restores the caller's order: row j of the joined result belongs at place ``order[j]``.
        rows: number of real rows by taken position.
        ranks: ranks of the taken outputs, for error messages; None: they equal ``take``.
    """

    collect: Collect
    take: Sequence[int]
    trim: Sequence[tuple[int, int]] | None = None
    order: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    ranks: Sequence[int] | None = None


@dataclass(frozen=True)
class CallPlan:
    """All decisions about a call before any message is sent.

    If rows or elements are split, ``rows`` has the number of real rows and ``shards`` the index of the shard by
    position. ``shared`` are objects that several shards contain, to be encoded once.
    """

    ranks: Sequence[int]
    args: tuple[Same | Each, ...]
    kwargs: Mapping[str, Same | Each]
    gather: GatherPlan
    rows: Sequence[int] | None = None
    shared: tuple[Any, ...] = ()
    shards: Sequence[int] | None = None

    def arguments(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the positional and the keyword arguments of each position, in order."""
        size, count, names = len(self.ranks), len(self.args), tuple(self.kwargs)
        columns = [
            itertools.repeat(argument.value, size) if isinstance(argument, Same) else argument.values
            for argument in (*self.args, *self.kwargs.values())
        ]
        for values in zip(*columns, strict=True) if columns else itertools.repeat((), size):
            yield values[:count], dict(zip(names, values[count:], strict=True)) if names else {}

    def keeps(self, position: int) -> bool:
        """Return whether the output of the rank at ``position`` is part of the result."""
        return len(self.gather.take) == len(self.ranks) or position in self._taken

    def without_arguments(self) -> CallPlan:
        """Return the plan without the caller's arguments, so that a sent call does not keep them alive."""
        if not self.args and not self.kwargs:
            return self
        return CallPlan(self.ranks, (), {}, self.gather, self.rows, shards=self.shards)

    @cached_property
    def _taken(self) -> frozenset[int]:
        return frozenset(self.gather.take)


class Target(Protocol):
    """The attributes of a group that planning needs. Custom functions receive a target as ``group``."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str = "default") -> Mesh:
        """Return a mesh of the group, over ``world_size`` ranks.

        Raises:
            DispatchError: if the group has no mesh of that name.
        """
        ...


@dataclass(frozen=True)
class CallInput:
    """Input for the planner of a mode: the method, its arguments, and the ranks to call."""

    spec: MethodSpec
    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: Sequence[int]
    materialize: Materialize = result_of
    handle: Target | None = None  # passed to custom functions as the group

    @property
    def mode(self) -> Mode:
        return self.spec.mode

    @property
    def where(self) -> str:
        """Start of error messages: the method and its mode."""
        return f"{self.spec.name}() [{self.mode!r}]"

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Yield the name in error messages and the value of each argument, positional arguments first."""
        names = self.spec.positional_names
        for index, value in enumerate(self.args):
            yield names[index] if index < len(names) else f"argument {index + 1}", value
        yield from self.kwargs.items()

    def settled(self) -> CallInput:
        """Return a copy of the call in which results replace all futures."""

        def settled(value: Any) -> Any:
            return replaced(value, is_future, self.materialize)

        kwargs = {key: settled(value) for key, value in self.kwargs.items()}
        return replace(self, args=tuple([settled(value) for value in self.args]), kwargs=kwargs)


def check_signature(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that the method accepts the arguments.

    Raises:
        DispatchError: if it does not; the message shows the method's signature.
    """
    signature = spec.signature
    if signature is None:
        return
    if not kwargs and len(args) in spec.positional_counts:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DispatchError(
            f"{spec.name}(): {error}; the method is {spec.name}{signature}. Nothing was sent"
        ) from None
