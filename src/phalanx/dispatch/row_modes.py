"""Planning of the modes that split rows: over all ranks, or over the dp coordinates of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.declare.dispatch_modes import MeshMode
from phalanx.dispatch.arguments import Argument, CallInput
from phalanx.dispatch.plan import CallPlan, Each, GatherPlan, Same
from phalanx.dispatch.pytree import Leaf, flatten, is_future, node_of, unwrap
from phalanx.dispatch.shardable import ops_for
from phalanx.dispatch.split import (
    Cut,
    even_sizes,
    grouped_sizes,
    refuse_unclear_rows,
    row_ops,
    rows_of,
    split_leaves,
)
from phalanx.errors import DispatchError
from phalanx.topology.balance import balanced_partition
from phalanx.wire.lazy import is_tensor, lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

_SCALARS = (bool, int, float, complex, type(None))


@dataclass(frozen=True)
class Recipients:
    """To whom the pieces go: ``of[p]`` is the piece of the rank at position ``p`` of the call's ranks.

    A range for ``of`` says that position ``p`` gets piece ``p``. ``take`` are the positions whose outputs are
    joined, in the order of the pieces. ``leaders``, where given, are the positions that get a piece at all;
    their peers get None instead.
    """

    count: int
    of: Sequence[int]
    take: Sequence[int]
    leaders: frozenset[int] | None = None

    def deal(self, pieces: Sequence[Any]) -> Each:
        """Assign a piece to each rank; peers share the same object."""
        if self.leaders is not None:
            return Each([pieces[i] if p in self.leaders else None for p, i in enumerate(self.of)])
        return Each(self.spread(pieces))

    def spread(self, by_piece: Sequence[Any]) -> Sequence[Any]:
        """Return the metadata of each piece, by position."""
        return by_piece if isinstance(self.of, range) else [by_piece[i] for i in self.of]


def over_ranks(call: CallInput) -> Recipients:
    """A piece for each called rank."""
    everybody = range(len(call.ranks))
    return Recipients(len(call.ranks), everybody, everybody)


def plan_rows(call: CallInput, recipients: Recipients, whole: int | str | None = None) -> CallPlan:
    """Rows split over the recipients; the argument at ``whole`` goes to all as it is."""
    mode = call.mode if isinstance(call.mode, MeshMode) else None
    uneven = mode is not None and (mode.balance is not None or mode.group_size > 1)
    if uneven or call.spec.pad_mask is not None:
        call = call.settled()
    taken = _TakenApart.of(call, whole)
    if taken.rows is None and call.spec.pad_to_multiple is not None and taken.futures:
        call = call.settled()  # padding can only be undone if the rows are counted here
        taken = _TakenApart.of(call, whole)
    known = (
        taken.rows is not None
    )  # else only futures have rows, or nothing has any: then every rank gets the same
    cut = (
        Cut([0] * recipients.count) if taken.rows is None else _cut(call, mode, recipients.count, taken.rows)
    )
    plan = call.planned(
        lambda argument: taken.given(argument, recipients, cut),
        _gather_plan(call, recipients, cut) if known else GatherPlan.of_mode(call.mode, recipients.take),
        recipients.spread(cut.sizes) if known else None,
        taken.shared,
        recipients.of if known or taken.futures else None,
    )
    if call.spec.pad_mask is None:
        return plan
    mask = recipients.deal(_masks(cut)) if known else Same(None)
    return replace(plan, kwargs={**plan.kwargs, call.spec.pad_mask: mask})


@dataclass(frozen=True)
class _TakenApart:
    """The arguments of a call, leaf by leaf."""

    leaves: Mapping[int | str, tuple[list[Leaf], Callable[..., Any]]]
    whole: int | str | None
    rows: int | None
    futures: bool
    shared: tuple[Any, ...]

    @classmethod
    def of(cls, call: CallInput, whole: int | str | None) -> _TakenApart:
        leaves = {a.key: _flattened(call, a) for a in call.arguments() if a.key != whole}
        every = [leaf for found, _ in leaves.values() for leaf in found]
        refuse_unclear_rows(every, call.where)
        shared = {
            id(leaf.value): unwrap(leaf.value)
            for found, build in leaves.values()
            if build is not next and any(_differs(leaf) for leaf in found)
            for leaf in found
            if not _differs(leaf) and not isinstance(leaf.value, _SCALARS)
        }
        futures = any(is_future(leaf.value) for leaf in every)
        return cls(leaves, whole, rows_of(every, call.where), futures, tuple(shared.values()))

    def given(self, argument: Argument, recipients: Recipients, cut: Cut) -> Same | Each:
        """Return the pieces of an argument for the ranks."""
        if argument.key == self.whole:
            return Same(unwrap(argument.value))
        leaves, build = self.leaves[argument.key]
        if not any(_differs(leaf) for leaf in leaves):
            return Same(unwrap(argument.value))
        return recipients.deal(split_leaves(leaves, build, cut, self.rows))


def _flattened(call: CallInput, argument: Argument) -> tuple[list[Leaf], Callable[..., Any]]:
    try:
        return flatten(argument.value, argument.name)
    except DispatchError as error:
        raise DispatchError(f"{call.where}: {error}") from None


def _differs(leaf: Leaf) -> bool:
    """Return whether each piece has another value of the leaf."""
    return is_future(leaf.value) or row_ops(leaf) is not None


def _cut(call: CallInput, mode: MeshMode[Any] | None, count: int, rows: int) -> Cut:
    pad = call.spec.pad_to_multiple
    if mode is None:
        return Cut(even_sizes(rows, count), pad_to_multiple=pad)
    group_size = mode.group_size
    if rows % group_size:
        raise DispatchError(
            f"{call.where}: {rows} rows cannot be kept in groups of group_size = {group_size}; give a "
            f"multiple of {group_size} rows"
        )
    if mode.balance is None:
        sizes = even_sizes(rows, count) if group_size == 1 else grouped_sizes(rows, count, group_size)
        return Cut(sizes, pad_to_multiple=pad)
    lengths = _lengths(call, mode.balance, rows)
    indices = balanced_partition(lengths, count, group_size=group_size)
    return Cut([len(part) for part in indices], indices, pad)


def _gather_plan(call: CallInput, recipients: Recipients, cut: Cut) -> GatherPlan:
    sizes = recipients.spread(cut.sizes)
    real = (
        sizes if recipients.take == range(len(sizes)) else [sizes[position] for position in recipients.take]
    )
    trim = None
    if cut.pad_to_multiple is not None and any(size % cut.pad_to_multiple for size in real):
        given = recipients.spread(cut.given)
        trim = [(given[position], sizes[position]) for position in recipients.take]
    return GatherPlan.of_mode(call.mode, recipients.take, rows=real, trim=trim, order=cut.order)


def _masks(cut: Cut) -> list[torch.Tensor]:
    return [torch.arange(given) < real for given, real in zip(cut.given, cut.sizes, strict=True)]


def _lengths(call: CallInput, balance: str | Callable[..., Any], rows: int) -> list[float]:
    """Return a length per row, from the key or function that the mode balances by."""
    if callable(balance):
        found = balance(*(unwrap(v) for v in call.args), **{k: unwrap(v) for k, v in call.kwargs.items()})
        source = f"the balance function {getattr(balance, '__name__', balance)!s}"
    else:
        found, source = _find_key(call, balance), f"balance={balance!r}"
    lengths = found.tolist() if hasattr(found, "tolist") else found
    if hasattr(lengths, "to_pylist"):
        lengths = lengths.to_pylist()
    numbers = isinstance(lengths, list | tuple) and all(isinstance(n, int | float) for n in lengths)
    if not numbers or len(lengths) != rows:
        raise DispatchError(
            f"{call.where}: {source} gives {_described(found)}; expected one number for each of the "
            f"{rows} rows"
        )
    return list(lengths)


def _find_key(call: CallInput, key: str) -> Any:
    arguments = list(call.arguments())
    for argument in arguments:
        if argument.name == key:
            return unwrap(argument.value)
    for argument in arguments:
        found = _inside(unwrap(argument.value), key)
        if found is not None:
            return found
    names = ", ".join(argument.name for argument in arguments) or "none"
    raise DispatchError(
        f"{call.where}: balance={key!r} is neither an argument nor a key or field in one (arguments: "
        f"{names}); pass it, or balance by a function of the arguments"
    )


def _inside(value: Any, key: str) -> Any:
    """Return the item of ``value`` under ``key``, at any depth; None where it does not."""
    if ops_for(value) is not None:
        return value[key] if key in _columns(value) else None
    node = node_of(value)
    if node is None:
        return None
    steps = (f"[{key!r}]", f".{key}")
    for step, child in zip(node.steps, node.values, strict=True):
        found = child if step in steps else _inside(child, key)
        if found is not None:
            return found
    return None


def _columns(value: Any) -> Sequence[Any]:
    """Return the column names of a value with rows, a TensorDict or an Arrow table."""
    if is_tensor(value) or isinstance(value, list | np.ndarray):
        return ()
    names = getattr(value, "column_names", None)
    if names is None and callable(getattr(value, "keys", None)):
        names = list(value.keys())
    return names or ()


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else repr(value)
