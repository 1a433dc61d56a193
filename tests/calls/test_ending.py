"""The outcome of a call, decided from observations of its ranks."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType

import pytest

import phalanx as px
from phalanx.calls.diagnosis import CallObservation, CallOutcome, decide
from phalanx.errors import RankReport


def report(rank: int, kind: str = "raised", **more: object) -> RankReport:
    return RankReport(rank=rank, kind=kind, message="odd", **more)  # pyright: ignore[reportArgumentType]


def seen(why: str, *reports: RankReport, **more: object) -> CallObservation:
    return CallObservation(why, "actor", "update", reports, **more)  # pyright: ignore[reportArgumentType]


LATE = [report(0, "timeout", state="finished"), report(1, "timeout", state="running")]
ENDINGS: dict[str, tuple[CallObservation, type, CallOutcome]] = {
    "raised, all ranks ended": (seen("failed", report(1)), px.RemoteCallError, CallOutcome()),
    "raised, a rank is late": (
        seen("failed", report(0), report(1, "stopped", victim=True), pending=[1]),
        *(px.RemoteCallError, CallOutcome(stop=[1], breaks=True)),
    ),
    "a rank died": (
        seen("failed", report(0, "died"), report(1)),
        px.WorkerDiedError,
        CallOutcome(breaks=True),
    ),
    "the owner ended the ranks": (
        seen("failed", report(0, "died"), by_owner=True),
        *(px.GroupClosed, CallOutcome(closes=True)),
    ),
    "patience over, all ended since": (seen("impatient"), NoneType, CallOutcome(over=False)),
    "patience over": (
        seen("impatient", *LATE, pending=[1], waited=3.0),
        px.CallTimeout,
        CallOutcome(over=False),
    ),
    "deadline over, all ended since": (seen("expired"), NoneType, CallOutcome(over=False)),
    "deadline over": (
        seen("expired", *LATE, pending=[1], waited=3.0),
        *(px.CallTimeout, CallOutcome(stop=[1], breaks=True)),
    ),
    "cancelled, all returned before": (
        seen("cancelled", report(0, "cancelled", state="finished")),
        *(NoneType, CallOutcome(over=False)),
    ),
    "cancelled, all yielded": (
        seen("cancelled", report(0, "cancelled"), report(1, "cancelled", state="finished")),
        *(px.CallCancelled, CallOutcome()),
    ),
    "cancelled, connections were cut": (
        seen("cancelled", report(0, "cancelled"), severed=True),
        *(px.CallCancelled, CallOutcome(breaks=True)),
    ),
}


@pytest.mark.parametrize(("observation", "error", "outcome"), ENDINGS.values(), ids=ENDINGS)
def test_an_observation_determines_the_outcome_of_a_call(
    observation: CallObservation, error: type, outcome: CallOutcome
) -> None:
    ending = decide(observation)

    assert isinstance(ending.error, error)
    assert replace(ending, error=None) == outcome
