"""A plan as people read it: bytes by hop, rank and mover; what is cast, renamed, tied and left over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from phalanx.display.byte_format import size
from phalanx.display.tables import Table
from phalanx.weights.planning.locality import Hop
from phalanx.weights.planning.resharding_plan import Plan

__all__ = ["bytes_by_link", "explain_plan"]

MOVERS: Mapping[Hop, str] = {Hop.PROCESS: "copy", Hop.NODE: "segments", Hop.OTHER: "store"}


def bytes_by_link(plan: Plan) -> dict[tuple[int, int, Hop], int]:
    """Bytes from each source rank to each target rank, by hop."""
    found: dict[tuple[int, int, Hop], int] = defaultdict(int)
    for lane in plan.lanes:
        for piece in lane.pieces:
            for target in piece.targets:
                found[piece.source, target, piece.hop] += lane.nbytes(piece) * len(lane.pairs)
    return dict(sorted(found.items()))


def explain_plan(
    plan: Plan,
    *,
    movers: Mapping[Hop, str] = MOVERS,
    delta_base: int = 0,
    title: str = "weights",
) -> Table:
    """A row for each pair of ranks, and below it what is not plain.

    Args:
        movers: what carries each hop.
        delta_base: bytes of the copies that sources keep for deltas; 0 without deltas.
    """
    rows = tuple(
        (f"rank {source}", f"rank {target}", str(hop), movers[hop], size(nbytes))
        for (source, target, hop), nbytes in bytes_by_link(plan).items()
    )
    return Table(
        f"{title}: {size(plan.nbytes)} to {plan.targets} ranks, {_count(plan)} tensors",
        ("from", "to", "hop", "mover", "bytes"),
        rows,
        tuple(_notes(plan, delta_base)),
    )


def _count(plan: Plan) -> int:
    return len({pair.target for lane in plan.lanes for pair in lane.pairs})


def _notes(plan: Plan, delta_base: int) -> list[str]:
    notes: list[str] = []
    hops: dict[Hop, int] = defaultdict(int)
    for (_, _, hop), nbytes in bytes_by_link(plan).items():
        hops[hop] += nbytes
    notes.append("by hop: " + (", ".join(f"{hop} {size(hops[hop])}" for hop in sorted(hops)) or "nothing"))
    casts: dict[str, int] = defaultdict(int)
    for lane in plan.lanes:
        if lane.source_dtype != lane.dtype:
            casts[f"{lane.source_dtype} to {lane.dtype}"] += len({pair.target for pair in lane.pairs})
    renamed = sorted({pair for lane in plan.lanes for pair in lane.pairs if pair.source != pair.target})
    once = [(f"{twin} = {name}", "copied there") for name, twin in plan.echoes]
    once += [(f"{alias} = {name}", "one storage there") for alias, name in plan.ties]
    if casts:
        notes.append("cast at the source: " + ", ".join(f"{kind} ({n} tensors)" for kind, n in casts.items()))
    if renamed:
        notes.append(f"renamed or fused: {_few([f'{pair.source} -> {pair.target}' for pair in renamed])}")
    if once:
        notes.append(f"tied, travels once: {_few([f'{what} ({how})' for what, how in once])}")
    if plan.surplus:
        notes.append(f"not taken by the target: {_few(list(plan.surplus))}")
    if delta_base:
        notes.append(f"deltas: the sources keep one more copy of what they send, {size(delta_base)}")
    return notes


def _few(items: list[str], most: int = 4) -> str:
    rest = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest
