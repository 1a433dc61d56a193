"""Checks of debug mode that all ranks of a call did the same. Pure."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.collect.message import rank_list
from phalanx.errors import RankReport, RanksDiverged
from phalanx.wire.value import Value


def check_order(group: str, method: str, orders: Sequence[Sequence[tuple[int, str]]]) -> None:
    """Compare the order in which the ranks ran the calls, by number and name, that all of them still remember.

    Raises:
        RanksDiverged: if some ranks ran them in another order than most (of equally many: than the lower ranks), so
            that their collectives would not match.
    """
    common = set.intersection(*(set(order) for order in orders)) if orders else set[tuple[int, str]]()
    seen = [tuple(call for call in order if call in common) for order in orders]

    usual, odd = _odd_ones(seen, operator.eq)

    def describe(rank: int) -> str:
        pairs = zip(seen[rank], seen[usual], strict=True)
        (number, name), (other_number, other) = next(pair for pair in pairs if pair[0] != pair[1])
        return f"ran {name} (call {number}) where rank {usual} ran {other} (call {other_number})"

    if odd:
        did = "did not run the calls in the order of the others"
        advice = (
            "Several processes or views call this group at once: let one of them make all calls that use "
            "collectives."
        )
        raise _diverged(group, method, {rank: describe(rank) for rank in odd}, did, advice)


def check_replicated(group: str, method: str, ranks: Sequence[int], outputs: Sequence[Any]) -> None:
    """Compare outputs that were declared ``replicated=True``.

    Raises:
        RanksDiverged: if some outputs differ from the output of most ranks.
    """
    usual, odd = _odd_ones(outputs, same)
    if odd:
        other = f"where rank {ranks[usual]} returned {_short(outputs[usual])}"
        messages = {ranks[one]: f"returned {_short(outputs[one])} {other}" for one in odd}
        did = "returned something else than the others, though it is declared replicated"
        advice = "Look for a missing all_reduce, a seed by rank, or data that only some ranks got."
        raise _diverged(group, method, messages, did, advice)


def same(a: Value, b: Value) -> bool:
    """Return whether two outputs are the same: arrays bit for bit, other values by ``==``; NaN is the same as NaN.

    Parts that cannot be compared, such as sparse tensors, count as the same.
    """
    try:
        return _same(a, b)
    except RecursionError:  # of a value that contains itself
        raise
    except Exception:
        return True


def _same(a: Value, b: Value) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Mapping):
        return set(a.keys()) == set(b.keys()) and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "equals"):  # a table, such as of pandas
        return bool(a.equals(b))
    if hasattr(a, "shape") and hasattr(a, "dtype"):
        if a.dtype == object:
            return a.shape == b.shape and all(map(same, a.flat, b.flat))
        return a.shape == b.shape and a.dtype == b.dtype and _bytes(a) == _bytes(b)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def _bytes(array: Value) -> bytes:
    """Return the content of a torch tensor or a numpy array."""
    if hasattr(array, "detach"):
        import torch

        array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _odd_ones(values: Sequence[Any], equal: Callable[[Any, Any], bool]) -> tuple[int, list[int]]:
    """Return the first position of the most common value, and the positions of other values."""
    kinds: list[list[int]] = []  # positions of equal values
    for position, value in enumerate(values):
        kind = next((kind for kind in kinds if equal(values[kind[0]], value)), None)
        if kind is None:
            kinds.append([position])
        else:
            kind.append(position)
    usual = max(kinds, key=len, default=[0])
    return usual[0], [position for kind in kinds if kind is not usual for position in kind]


def _diverged(group: str, method: str, messages: Mapping[int, str], did: str, advice: str) -> RanksDiverged:
    """Return the error of a call in which some ranks did something else; ``messages`` has what, by rank."""
    reports = tuple(
        RankReport(rank=rank, kind="raised", method=method, message=message)
        for rank, message in messages.items()
    )
    lines = [f"group {group!r}, method {method}: {rank_list(messages)} {did}"]
    lines += [f"  rank {report.rank} {report.message}" for report in reports[:8]]
    return RanksDiverged("\n".join([*lines, advice]), group=group, method=method, failures=reports)
