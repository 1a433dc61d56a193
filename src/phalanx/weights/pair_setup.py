"""A source's and a target's ranks brought together, once per pair of epochs: asked, planned, and given their ends."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.calls.call import Call
from phalanx.calls.run_on import run_on
from phalanx.errors import DeclarationError, InternalError, PhalanxError, RemoteCallError
from phalanx.group.epoch import Epoch
from phalanx.weights.planning.boxes import Patch, whole
from phalanx.weights.planning.fused import Fused
from phalanx.weights.planning.locality import Hop, Places
from phalanx.weights.planning.matching import Rename, renamer
from phalanx.weights.planning.resharding_plan import Plan
from phalanx.weights.planning.resharding_planner import Plans
from phalanx.weights.planning.shard_manifest import Held, Manifest
from phalanx.weights.sync_sides import SyncSide, send_to
from phalanx.weights.worker import weight_handlers as questions
from phalanx.weights.worker.weight_requests import (
    DELTA_MOVERS,
    IN_PLACE,
    ConnectRequest,
    Description,
    Joined,
)

__all__ = ["MOVERS", "Pair", "PairOptions", "make_pair"]

MOVERS: Mapping[Hop, str] = {Hop.PROCESS: "copy", Hop.NODE: "segments", Hop.OTHER: "store"}

_REFUSAL = f"{DeclarationError.__module__}.{DeclarationError.__qualname__}"
_keys = itertools.count(1)
_OURS = secrets.token_hex(6)


@dataclass(frozen=True)
class PairOptions:
    """How the two sides are brought together."""

    rename: Rename | None = None
    fused: tuple[Fused, ...] = ()
    bucket_bytes: int = 256 << 20
    movers: Mapping[Hop, str] = field(default_factory=lambda: MOVERS)
    delta: bool = False


@dataclass(frozen=True, eq=False)
class Pair:
    """Ranks that have their ends for one plan. It belongs to a pair of epochs, and ends with either."""

    key: str
    source: SyncSide
    target: SyncSide
    plan: Plan
    movers: Mapping[Hop, str]
    newest: int
    epochs: tuple[Epoch, Epoch]

    @property
    def current(self) -> bool:
        """Whether both groups still are in the epochs that it was made for."""
        return (self.source.core.epoch, self.target.core.epoch) == self.epochs

    @property
    def stores(self) -> bool:
        """Whether something goes through the object store."""
        hops = {piece.hop for lane in self.plan.lanes for piece in lane.pieces}
        return any(self.movers[hop] == "store" for hop in hops)

    @property
    def delta_base(self) -> int:
        """Bytes of what its sources keep for deltas: all that goes by movers that have them, once for all readers."""
        return sum(
            lane.nbytes(piece) * len(lane.pairs)
            for lane in self.plan.lanes
            for piece in lane.pieces
            if self.movers[piece.hop] in DELTA_MOVERS
        )

    def part(self) -> None:
        """Give back what the ranks hold for it, as far as they can be reached; does not wait."""
        for side, epoch in zip((self.source, self.target), self.epochs, strict=True):
            core = side.core
            if core.closed:
                continue
            dead = set(core.epoch.dead(core.transport))
            everyone = side.ranks if core.epoch is epoch else range(core.epoch.size)
            # Where the processes are others, the former ones are gone, and all that they held.
            ranks = [rank for rank in everyone if rank not in dead and core.epoch.takes((rank,), epoch)]
            with contextlib.suppress(PhalanxError):
                run_on(core, questions.leave, self.key, ranks=ranks, title="px.WeightSync", checked=False)


def make_pair(source: SyncSide, target: SyncSide, plans: Plans, options: PairOptions) -> Pair:
    """Ask both sides what they have, plan, and have each rank make its ends.

    Raises:
        WeightsMismatch: the two sides do not fit; has the table.
        DeclarationError: a worker publishes, or accepts, nothing of that name, or it cannot be read.
        GroupClosed, GroupBroken, WorkerDiedError: a group takes no calls.
    """
    epochs = source.core.epoch, target.core.epoch
    sources, targets = _described(source, target)
    given = _given([one.manifest for one in sources if one.manifest], options.rename)
    manifests = [one.manifest or given for one in targets]
    places = Places(tuple(one.place for one in sources), tuple(one.place for one in targets))
    movers = _movers(options.movers, sources, targets, places)
    plan = plans.get(
        [one.manifest or given for one in sources],
        manifests,
        places=places,
        rename=options.rename,
        fused=options.fused,
    )
    if not options.delta and _in_place(targets, plan):
        movers = {**movers, Hop.NODE: IN_PLACE}
    key = f"{_OURS}-{next(_keys)}"
    order = ConnectRequest(
        key,
        source.asked,
        source.ranks,
        plan,
        None,
        options.bucket_bytes,
        movers,
        store=sources[0].store,
        delta=options.delta,
    )
    joined = _joined(source, order, plan)
    addresses = {index: one.address for index, one in enumerate(joined) if one.address}
    order = replace(order, asked=target.asked, ranks=target.ranks, given=given, addresses=addresses)
    _joined(target, order, plan)
    newest = max(one.number for one in (*sources, *targets))
    return Pair(key, source, target, plan, movers, newest, epochs)


def _in_place(targets: Sequence[Description], plan: Plan) -> bool:
    """Whether sources write into what targets of their node load from: each byte for one target only.

    For several a ring is better, into which a byte is written once, and which they read at the same time.
    """
    pieces = (piece for lane in plan.lanes for piece in lane.pieces if piece.hop is Hop.NODE)
    return all(len(piece.targets) == 1 and targets[piece.targets[0]].placed for piece in pieces)


def _described(source: SyncSide, target: SyncSide) -> tuple[list[Description], list[Description]]:
    calls = [_ask(side, "described", questions.describe, side.asked) for side in (source, target)]
    try:
        return _answers(source, calls[0]), _answers(target, calls[1])
    except PhalanxError:  # the other side may refuse too: Ray prints the traceback of what nobody fetches
        with contextlib.suppress(PhalanxError):
            calls[1].result(1.0)
        raise


def _answers(side: SyncSide, call: Call) -> list[Any]:
    """What the ranks answered; what they refuse is the caller's fault, and not the ranks'."""
    try:
        return call.result(None)
    except RemoteCallError as error:
        refused = next((one for one in error.failures if one.type_name == _REFUSAL), None)
        if refused is None:
            raise
        raise DeclarationError(f"{side.title}, rank {refused.rank}: {refused.message}") from None


def _ask(side: SyncSide, what: str, function: Any, *args: Any) -> Call:
    return send_to(side.core, side.ranks, f"weights {side.asked.name!r}: {what}", function, *args)


def _joined(side: SyncSide, order: ConnectRequest, plan: Plan) -> list[Joined]:
    answers: list[list[Joined]] = _answers(side, _ask(side, "planned", questions.join, order))
    joined = [one for answer in answers for one in answer]
    wrong = [rank for rank, one in zip(side.ranks, joined, strict=True) if one.digest != plan.digest]
    if wrong:
        raise InternalError(
            f"ranks {wrong} of {side.title} have another plan for weights {side.asked.name!r} than the driver"
        )
    return joined


def _given(manifests: Sequence[Manifest], rename: Rename | None) -> Manifest:
    """All that the sources have, each tensor whole, under the target's names."""
    held: dict[str, Held] = {}
    ties: dict[str, str] = {}
    named = renamer(rename)
    for manifest in manifests:
        for name, one in manifest.items():
            held.setdefault(
                named(name), Held(one.dtype, one.shape, (Patch(whole(one.shape), (0,) * len(one.shape)),))
            )
        ties |= {named(alias): named(name) for alias, name in manifest.ties}
    return Manifest.of(held, {alias: name for alias, name in ties.items() if alias not in held})


def _movers(
    asked: Mapping[Hop, str], sources: Sequence[Description], targets: Sequence[Description], places: Places
) -> Mapping[Hop, str]:
    """What carries each hop; where targets share the source's storage, nothing does.

    Raises:
        DeclarationError: a target wants the storage of a source of which it is no role.
    """
    if not any(one.share for one in targets):
        return asked
    alone = [
        index
        for index, (one, place) in enumerate(zip(targets, places.targets, strict=True))
        if not one.share or index >= len(sources) or places.sources[index].process != place.process
    ]
    if alone or len(sources) != len(targets):
        raise DeclarationError(
            f"accept_weights(..., share=True) is for roles of one process: target ranks {alone or 'of another number'} "
            "are no role beside the source; accept the weights without share=True, which copies"
        )
    return {**asked, Hop.PROCESS: "shared"}
