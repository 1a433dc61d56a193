"""Scenarios, their order and goals: plain data for the runner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.contenders.saves import RANKS as SAVING_RANKS
from bench.contenders.weights import REPLICATED, SHARDED
from bench.stats import Case, Goal

PHALANX, VERL, VERL_NUMPY, BARE, FLOOR = "phalanx", "verl", "verl numpy", "bare Ray", "floor"
UNTRACED = "no trace"
UNSAVED = "no save"
ALL_BYTES, UNVERIFIED = "phalanx, all bytes", "phalanx, unverified"
ON_RAY = (PHALANX, VERL, BARE)
ON_WEIGHTS = (PHALANX, ALL_BYTES, UNVERIFIED, BARE, FLOOR)
DATA = (PHALANX, VERL, VERL_NUMPY, BARE, FLOOR)

BRAKED, UNBRAKED = "1000 items, 8 unread at most", "1000 items, any number unread"
BUSY = "driver computes"
INLINE, PUT_ONCE = "in each message", "put once"


@dataclass(frozen=True)
class Step:
    """A case, its repetitions (after `warmups` discarded turns), and its request.

    `seconds` bounds the turns of a contender: slow contenders repeat less often, but at least once. `warming` replaces
    some of `args` in discarded turns.
    """

    case: Case
    op: str
    args: Mapping[str, Any]
    contenders: tuple[str, ...]
    repeats: int
    warmups: int = 1
    account: bool = False
    seconds: float = math.inf
    warming: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Block:
    """Groups that live during the steps. The first start of group "a" is measured `starts` times.

    For the steps of `apart`, which come last, only one contender at a time has its groups, `apart_groups`, since the
    groups of all contenders would not fit into memory. So these steps are not interleaved.
    """

    ranks: int
    groups: tuple[str, ...] = ()
    starts: int = 0
    start_warmups: int = 0
    steps: tuple[Step, ...] = ()
    apart: tuple[Step, ...] = ()
    apart_groups: tuple[str, ...] = ("a",)


@dataclass(frozen=True)
class Plan:
    """Sizes and repetitions of a run."""

    empty_ranks: tuple[int, ...] = (1, 2, 4, 8, 16)
    data_ranks: tuple[int, ...] = (4, 8)
    megabytes: tuple[int, ...] = (1, 16, 64, 256)
    weights: tuple[tuple[str, int], ...] = ((SHARDED, 512), (SHARDED, 1024), (REPLICATED, 512))
    planning_ranks: tuple[int, ...] = (64, 256, 1024, 4096)
    threshold_kilobytes: tuple[int, ...] = (4, 16, 32, 64, 96, 128, 256, 1024)
    chain_megabytes: int = 256
    save_megabytes: int = 1024
    chain_ranks: int = 4
    repeats: int = 5
    start_repeats: int = 3
    empty_calls: int = 50
    traced_calls: int = 100
    flow_ranks: tuple[int, ...] = (1, 2, 4)
    flow_items: Mapping[int, int] = field(default_factory=lambda: {1: 500, 1 << 10: 50, 64 << 10: 4})
    flow_seconds: float = 6.0
    pipelined_calls: int = 1000
    imports: bool = True
    goals: Mapping[Case, tuple[Goal, ...]] = field(default_factory=dict)


FULL = Plan()
QUICK = Plan(
    empty_ranks=(1, 4),
    flow_ranks=(1,),
    data_ranks=(4,),
    megabytes=(1, 256),
    planning_ranks=(64, 4096),
    weights=((SHARDED, 512),),
    threshold_kilobytes=(16, 64, 256),
    repeats=2,
    start_repeats=1,
    empty_calls=30,
    traced_calls=50,
    pipelined_calls=200,
    imports=False,
    save_megabytes=256,
)


def goals() -> dict[Case, tuple[Goal, ...]]:
    """Return the project's own bounds on ratios within a run."""
    saves = (SAVING_RANKS, FULL.save_megabytes)
    found: dict[Case, tuple[Goal, ...]] = {
        Case("start", 8): (Goal(BARE, 1.0), Goal(VERL, 1 / 2.5)),
        Case("pipelined_calls", 4, variant="1000 in flight"): (Goal(BARE, 1.05),),
        Case("split_gather", 4, 256): (Goal(VERL, 1 / 8),),
        Case("split_gather", 8, 256): (Goal(VERL, 1 / 5),),
        Case("chain_A_B_C", 4, 256): (Goal(VERL, 1 / 15), Goal(BARE, 1.0)),
        Case("call_of_10_ms", 4, variant="traced"): (Goal(UNTRACED, 1.02),),
        Case("stream", 4, kilobytes=4, variant=BRAKED): (Goal(BARE, 1.15),),
        Case("stream", 4, kilobytes=4, variant=UNBRAKED): (Goal(BARE, 1.15),),
        Case("save", *saves): (Goal(BARE, 0.85),),
        Case("load", *saves): (Goal(BARE, 1.1),),
        Case("step", *saves, variant="beside a save"): (Goal(UNSAVED, 1.4),),
    }
    for ranks in (1, 2, 4, 8, 16):
        found[Case("empty_call", ranks)] = (Goal(BARE, 1.05), Goal(VERL, 1.0))
    for layout, megabytes in FULL.weights:
        copies = (Goal(BARE, 1 / 2), Goal(FLOOR, 1 / 0.7)) if layout == SHARDED else ()
        case = Case("weights", megabytes=megabytes, variant=layout)
        found[case] = (*copies, Goal(UNVERIFIED, 1.05))
    for ranks in (4, 8):
        found[Case("broadcast", ranks, 256)] = (Goal(VERL, 1 / 20),)
        for megabytes in (1, 16):
            found[Case("split_gather", ranks, megabytes)] = (Goal(BARE, 1.1),)
    for ranks in FULL.flow_ranks:
        found[Case("flow", ranks, kilobytes=1, variant="500 items a rank")] = (Goal(VERL, 1 / 5),)
        found[Case("flow", ranks, 1, variant="50 items a rank")] = (Goal(VERL, 1 / 2.5),)
        found[Case("flow", ranks, 64, variant="4 items a rank")] = (Goal(VERL, 1 / 4),)
        found[Case("flow", ranks, kilobytes=1, variant=f"500 items a rank, {BUSY}")] = (Goal(VERL, 1 / 5),)
    return found


def blocks(plan: Plan) -> Iterator[Block]:
    """Return the whole run: steps without a group; the chain, while there is memory; a block per number of ranks."""
    yield Block(0, steps=tuple(_without_groups(plan)))
    yield Block(0, steps=tuple(_weights(plan)))
    yield Block(0, steps=tuple(_saves(plan)))
    yield Block(plan.chain_ranks, apart=(_chain(plan),), apart_groups=("a", "b", "c"))
    for ranks in plan.flow_ranks:
        yield Block(ranks, apart=tuple(_flow(plan, ranks)), apart_groups=("a", "b"))
    for ranks in sorted({*plan.empty_ranks, *plan.data_ranks}):
        measured = ranks in plan.data_ranks
        first = ranks == min(plan.data_ranks)
        yield Block(
            ranks,
            groups=("a",),
            starts=plan.start_repeats if measured else 1,
            start_warmups=1 if measured and first and plan.start_repeats > 1 else 0,
            steps=tuple(_on_groups(plan, ranks)) + (tuple(_data(plan, ranks)) if first else ()),
            apart=tuple(_data(plan, ranks)) if measured and not first else (),
        )


def _without_groups(plan: Plan) -> Iterator[Step]:
    if plan.imports:
        yield Step(Case("import"), "import", {}, ON_RAY, plan.repeats)
    for variant in ("ONE_TO_ALL", "DP_COMPUTE_PROTO"):
        for ranks in plan.planning_ranks:
            case = Case("planning", ranks, variant=variant)
            yield Step(case, "planning", {"ranks": ranks, "mode": variant}, (PHALANX,), plan.repeats)


def _weights(plan: Plan) -> Iterator[Step]:
    """Return the steps for weights; contenders make their roles."""
    for layout, size in plan.weights:
        ours = (*ON_WEIGHTS, VERL) if layout == REPLICATED else ON_WEIGHTS
        args = {"layout": layout, "megabytes": size}
        yield Step(
            Case("weights", megabytes=size, variant=layout), "weights", args, ours, 3 * plan.repeats, 2
        )


def _saves(plan: Plan) -> Iterator[Step]:
    """Return the steps for saves; contenders make their ranks."""
    size = plan.save_megabytes
    args = {"megabytes": size}
    for op in ("save", "load"):
        yield Step(Case(op, SAVING_RANKS, size), op, args, (PHALANX, BARE, FLOOR), plan.repeats)
    case = Case("step", SAVING_RANKS, size, variant="beside a save")
    yield Step(case, "step", args, (PHALANX, UNSAVED), plan.repeats)


def _on_groups(plan: Plan, ranks: int) -> Iterator[Step]:
    if ranks in plan.empty_ranks:
        args = {"group": "a", "calls": plan.empty_calls}
        yield Step(Case("empty_call", ranks), "empty", args, ON_RAY, 2 * plan.repeats + 1)
    if ranks == plan.data_ranks[0]:
        yield from _small_calls(plan, ranks)


def _flow(plan: Plan, ranks: int) -> Iterator[Step]:
    """Return the steps for channels and queues with as many consumers as producers; small items also while the driver
    computes.
    """
    for kilobytes, items in plan.flow_items.items():
        large, small = divmod(kilobytes, 1 << 10)
        case = Case("flow", ranks, large, small, variant=f"{items} items a rank")
        args = {"groups": ["a", "b"], "kilobytes": kilobytes, "items": items}
        warming = {"items": max(1, items // 10)}
        yield Step(case, "flow", args, ON_RAY, plan.repeats, seconds=plan.flow_seconds, warming=warming)
    kilobytes, items = min(plan.flow_items.items())
    case = Case("flow", ranks, kilobytes=kilobytes, variant=f"{items} items a rank, {BUSY}")
    args = {"groups": ["a", "b"], "kilobytes": kilobytes, "items": items, "busy": True}
    warming = {"items": max(1, items // 10)}
    yield Step(case, "flow", args, ON_RAY, plan.repeats, seconds=plan.flow_seconds, warming=warming)


def _chain(plan: Plan) -> Step:
    size = plan.chain_megabytes
    return Step(
        Case("chain_A_B_C", plan.chain_ranks, size),
        "chain",
        {"groups": ["a", "b", "c"], "megabytes": size},
        DATA,
        plan.repeats,
        account=True,
    )


def _small_calls(plan: Plan, ranks: int) -> Iterator[Step]:
    args = {"group": "a", "seconds": 0.01, "calls": plan.traced_calls}
    case = Case("call_of_10_ms", ranks, variant="traced")
    yield Step(case, "rest", args, (PHALANX, UNTRACED), 2 * plan.repeats + 1)
    calls = plan.pipelined_calls
    case = Case("pipelined_calls", ranks, variant=f"{calls} in flight")
    yield Step(case, "pipelined", {"group": "a", "calls": calls}, ON_RAY, max(2, plan.repeats - 2))
    for variant, buffer in ((BRAKED, 8), (UNBRAKED, None)):
        args = {"group": "a", "items": 1000, "buffer": buffer}
        case = Case("stream", ranks, kilobytes=4, variant=variant)
        yield Step(case, "stream", args, (PHALANX, BARE), plan.repeats)
    for kilobytes in plan.threshold_kilobytes:
        for variant in (INLINE, PUT_ONCE):
            case = Case("threshold", ranks, kilobytes=kilobytes, variant=variant)
            args = {"group": "a", "kilobytes": kilobytes, "variant": variant, "calls": 20}
            yield Step(case, "threshold", args, (BARE,), plan.repeats)


def _data(plan: Plan, ranks: int) -> Iterator[Step]:
    for op in ("broadcast", "split_gather"):
        for size in plan.megabytes:
            yield Step(
                Case(op, ranks, size),
                op,
                {"group": "a", "megabytes": size},
                DATA,
                plan.repeats,
                account=size == max(plan.megabytes),
            )
    size = max(plan.megabytes)
    args = {"group": "a", "megabytes": size}
    yield Step(
        Case("broadcast_readonly", ranks, size), "broadcast_readonly", args, (PHALANX, BARE), plan.repeats
    )
