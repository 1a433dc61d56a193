"""Input of the planning of a call: its arguments by name, checked against the method's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.declare.dispatch_modes import Collect, Mode
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, Each, GatherPlan, Same, Target
from phalanx.dispatch.pytree import is_future, replaced
from phalanx.errors import DispatchError

#: Function that waits for a future and returns its result.
Materialize = Callable[[Any], Any]


@dataclass(frozen=True)
class Argument:
    """An argument: its name in error messages, its key (position or keyword), and its value."""

    name: str
    key: int | str
    value: Any


@dataclass(frozen=True)
class CallInput:
    """Input for the planner of a mode: the method, its arguments, and the ranks to call."""

    spec: MethodSpec
    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: Sequence[int]
    materialize: Materialize | None = None
    handle: Target | None = None  # passed to custom functions as the group

    @property
    def mode(self) -> Mode:
        return self.spec.mode

    @property
    def where(self) -> str:
        """Start of error messages: the method and its mode."""
        return f"{self.spec.name}() [{self.mode!r}]"

    def arguments(self) -> Iterator[Argument]:
        """Yield all arguments, positional arguments first."""
        names = self.spec.positional_names
        for index, value in enumerate(self.args):
            yield Argument(names[index] if index < len(names) else f"argument {index + 1}", index, value)
        for key, value in self.kwargs.items():
            yield Argument(key, key, value)

    def planned(
        self,
        given: Callable[[Argument], Same | Each],
        take: Sequence[int],
        *,
        collect: Collect | None = None,
        rows: Sequence[int] | None = None,
        taken_rows: Sequence[int] | None = None,
        trim: Sequence[tuple[int, int]] | None = None,
        order: Sequence[int] | None = None,
        mask: Same | Each | None = None,
        shared: tuple[Any, ...] = (),
        pieces: Sequence[int] | None = None,
    ) -> CallPlan:
        """Return the plan of the call, in which ``given`` converts each argument.

        Args:
            take: positions of the ranks whose outputs are collected.
            collect: replaces ``collect`` of the mode, unless the mode drops all outputs.
            rows, shared, pieces: as in ``CallPlan``.
            taken_rows, trim, order: ``rows``, ``trim`` and ``order`` of ``GatherPlan``.
            mask: value of the method's mask of padded rows; None if no row is padded.
        """
        own = self.spec.mode.collect
        chosen = own if collect is None or own == "none" else collect
        if chosen in ("none", "first"):
            kept = int(chosen == "first")
            take, trim, taken_rows = take[:kept], trim and trim[:kept], taken_rows and taken_rows[:kept]
        order = order if chosen == "join" else None
        # Positions are ranks only if the complete group is called.
        ranks = None if isinstance(self.ranks, range) else [self.ranks[position] for position in take]
        gather = GatherPlan(chosen, take, trim, order, taken_rows, ranks)
        values, count = [given(argument) for argument in self.arguments()], len(self.args)
        kwargs = dict(zip(self.kwargs, values[count:], strict=True))
        if self.spec.pad_mask is not None:
            kwargs.setdefault(self.spec.pad_mask, mask or Same(None))
        return CallPlan(self.ranks, tuple(values[:count]), kwargs, gather, rows, shared, pieces)

    def settled(self) -> CallInput:
        """Return a copy of the call in which results replace all futures.

        Raises:
            DispatchError: if there is a future, but ``materialize`` is None.
        """

        def settled(value: Any) -> Any:
            return replaced(value, is_future, self.result_of)

        kwargs = {key: settled(value) for key, value in self.kwargs.items()}
        return replace(self, args=tuple(map(settled, self.args)), kwargs=kwargs)

    def result_of(self, future: Any) -> Any:
        """Wait for a future and return its result.

        Raises:
            DispatchError: if ``materialize`` is None.
        """
        if self.materialize is None:
            raise DispatchError(
                f"{self.where}: an argument is the result of another call ({future!r}), and this mode must "
                "see the value before it can plan; pass its .result() instead"
            )
        return self.materialize(future)


def check_signature(spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that the method accepts the arguments.

    Raises:
        DispatchError: if it does not; the message shows the method's signature.
    """
    signature = spec.signature
    if signature is None:
        return
    if not kwargs and spec.pad_mask is None and len(args) in spec.positional_counts:
        return
    mask = {} if spec.pad_mask is None else {spec.pad_mask: None}
    if mask.keys() & kwargs.keys():
        raise DispatchError(
            f"{spec.name}(): {spec.pad_mask!r} was given, but it is the mask of padded rows (pad_mask=), "
            "which the call fills in itself; leave it out"
        )
    try:
        signature.bind(*args, **kwargs, **mask)
    except TypeError as error:
        raise DispatchError(
            f"{spec.name}(): {error}; the method is {spec.name}{signature}. Nothing was sent"
        ) from None
