"""Whether an engine computes with its weights what their source computes: log-probabilities of a few fixed prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.errors import WeightsDiffer
from phalanx.execution.weights import questions
from phalanx.execution.weights.orders import Description, Probed
from phalanx.runtime.calls.call import Call
from phalanx.runtime.links.sides import WeightsSide, send_to

__all__ = ["NO_PROBE", "Probe", "ProbeCall", "ProbePlan", "plan_probe", "send_probe"]

_EXACT = 0.02
_ROUNDED = 0.5
"""Mean differences that rounding does not reach: where both sides have 32 bits, and where one has fewer."""


class ProbePlan(NamedTuple):
    """What a target that generates is compared by: ``prompts``; none where it does not.

    ``mute`` says why the source cannot be asked. ``within`` is the mean difference that is no fault.
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    mute: str = ""
    within: float = _ROUNDED


NO_PROBE = ProbePlan()


class Probe(NamedTuple):
    """How far log-probabilities of the engine are from those of the source: mean and largest of the absolute
    differences, over how many tokens."""

    mean: float
    largest: float
    tokens: int


class ProbeCall(NamedTuple):
    """The source's part of a comparison, a call of its own right behind those of the sync.

    A target tells its part with what it received: its ranks are asynchronous, so that a second call of theirs might
    begin before the one that receives.
    """

    source: Call
    within: float

    def result(self, title: str, told_by: Mapping[int, Probed]) -> Probe | str:
        """What came of it, once the sync is over; or why there is nothing to compare, empty where there will be.

        Args:
            title: of the targets. told_by: what each target rank told.

        Raises:
            WeightsDiffer: the engine computes something else.
        """
        told: list[Probed] = self.source.result(None)
        expected = next((one.log_probs for one in told if one.log_probs is not None), None)
        if expected is None:
            return next((one.why for one in told if one.why), "no source rank told any log-probabilities")
        probes = [
            (rank, _compared(expected, one.log_probs))
            for rank, one in told_by.items()
            if one.log_probs is not None
        ]
        if not probes:
            return ""  # they sleep: the next version is compared
        rank, worst = max(probes, key=lambda pair: math.inf if math.isnan(pair[1].mean) else pair[1].mean)
        if not worst.mean <= self.within:
            raise WeightsDiffer(
                f"rank {rank} of {title} has all weights of its source, bit for bit, and computes something else: "
                f"log-probabilities of {worst.tokens} tokens differ by {worst.mean:.3g} on average, "
                f"{worst.largest:.3g} at most, where {self.within:g} on average is allowed. Are they the same model, "
                "with the same configuration? Where that is meant (a quantised engine, say), give "
                "px.WeightSync(probe=) what is "
                "allowed, or probe=False"
            )
        return worst


def plan_probe(sources: Sequence[Description], targets: Sequence[Description]) -> ProbePlan:
    """How these are compared."""
    prompts = next((one.prompts for one in targets if one.prompts), ())
    mute = next((one.mute for one in sources if one.mute), "")
    types = {
        held.dtype
        for one in (*sources, *targets)
        if one.manifest is not None
        for _, held in one.manifest.items()
    }
    exact = types <= {"float32", "float64"}
    return ProbePlan(prompts, mute, _EXACT if exact else _ROUNDED)


def send_probe(source: WeightsSide, plan: ProbePlan, within: float) -> ProbeCall:
    """Ask the source."""
    title = f"weights {source.asked.name!r}: probed"
    asked = send_to(source.core, source.ranks, title, questions.probe, source.asked, plan.prompts)
    return ProbeCall(asked, within)


def _compared(expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> Probe:
    apart = [
        abs(one - other)
        for mine, theirs in zip(expected, found, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    return Probe(sum(apart) / len(apart), max(apart), len(apart))
