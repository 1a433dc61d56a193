"""The outcome of a call whose ranks have all ended, decided from observations of them."""

from __future__ import annotations

from typing import Any

import phalanx as px
from phalanx.calls.diagnosis import CallObservation, CallOutcome, decide
from phalanx.errors import RankReport


def outcome(why: Any, *reports: RankReport, **more: Any) -> CallOutcome:
    return decide(CallObservation(why, "actor", "update", reports, **more))


def test_a_call_whose_ranks_all_returned_has_no_error_and_aborted_collectives_break_the_group() -> None:
    interrupted = RankReport(rank=0, kind="cancelled", message="interrupted while it ran")
    returned = RankReport(rank=0, kind="cancelled", message="had returned", state="finished")

    assert outcome("impatient") == outcome("cancelled", returned) == CallOutcome(over=False)
    severed = outcome("cancelled", interrupted, severed=True)
    assert isinstance(severed.error, px.CallCancelled)
    assert severed == CallOutcome(severed.error, breaks=True)
