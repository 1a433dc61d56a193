"""Which of the caller's rows are in each piece of a call, read from its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan
from phalanx.dispatch.split import padded_size
from phalanx.runtime.tools.incoming import Incoming


@dataclass(frozen=True)
class Pieces:
    """The rows of each piece: real ones, where they begin, and how many reach the method."""

    of: Sequence[int] | None
    sizes: Mapping[int, int]
    starts: Mapping[int, int]
    given: Mapping[int, int]
    order: Sequence[int] | None

    @classmethod
    def of_sizes(
        cls, of: Sequence[int], sizes: Sequence[int], given: Mapping[int, int], order: Any
    ) -> Pieces:
        starts = [0, *accumulate(sizes)]
        return cls(
            of, dict(enumerate(sizes)), dict(enumerate(starts)), {**dict(enumerate(sizes)), **given}, order
        )

    @classmethod
    def of_plan(cls, plan: CallPlan, incoming: Incoming, spec: MethodSpec) -> Pieces:
        nothing = cls(None, {}, {}, {}, None)
        if plan.pieces is None:
            return nothing
        if plan.rows is None:
            sizes = incoming.sizes(plan)  # rows that futures bring, where their number is known
            if sizes is None:
                return nothing
            padded = {i: padded_size(rows, spec.pad_to_multiple) for i, rows in enumerate(sizes)}
            return cls.of_sizes(plan.pieces, sizes, padded, None)
        by_piece = dict(zip(plan.pieces, plan.rows, strict=True))
        take, trim = plan.gather.take, plan.gather.trim or ()
        given = {plan.pieces[p]: padded for p, (padded, _) in zip(take, trim, strict=bool(trim))}
        return cls.of_sizes(
            plan.pieces, [by_piece[i] for i in range(len(by_piece))], given, plan.gather.order
        )
