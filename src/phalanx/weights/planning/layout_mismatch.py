"""What does not fit between two sides, gathered and raised as one error with a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.display.tables import Table
from phalanx.errors import WeightsMismatch

__all__ = ["Fault", "refuse"]

_SHOWN = 30


class Fault(NamedTuple):
    """One thing that does not fit: the tensor, what was wanted, what was found, and on which rank."""

    name: str
    wanted: str
    found: str
    rank: str


def refuse(faults: Sequence[Fault]) -> None:
    """Raise all ``faults`` as one error, if there are any.

    Raises:
        WeightsMismatch: with the table of faults; its ``rows`` has them all, its message the first ones.
    """
    if not faults:
        return
    rows: tuple[Fault, ...] = tuple(dict.fromkeys(faults))
    notes = [f"... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    notes.append(
        "Nothing was moved. Let both sides name the same tensors (rename=, fused=), with the same global shapes, "
        "and boxes that together cover them."
    )
    table = Table(
        f"{len(rows)} of the weights' tensors do not fit",
        ("name", "wanted", "found", "rank"),
        rows[:_SHOWN],
        tuple(notes),
    )
    error = WeightsMismatch(str(table))
    error.rows = rows
    raise error
