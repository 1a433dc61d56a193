"""Many calls of one group waited for at once: their outputs are fetched by one request."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.backends.backend_types import FetchFailed, NotReady, Ref
from phalanx.calls.call import Call
from phalanx.calls.diagnosis import seconds_until
from phalanx.wire.codec import decoding


def together(calls: Sequence[Call], timeout: float | None) -> bool:
    """Wait until all these calls are over, if they can be waited for together; whether they are.

    Raises:
        PhalanxError: that of one which failed, as soon as it does.
        CallTimeout: so many seconds are over.
    """
    refs = _refs_of(calls)
    if refs is None:
        return False
    for call in calls:
        call.tell_asked()
    first = calls[0]
    backend = first.core.backend
    limit = None if timeout is None else backend.now() + timeout
    try:
        with decoding(first.decodes, meter=first.meter):
            outputs = backend.fetch(refs, timeout)
    except (NotReady, FetchFailed):
        _tell_first(calls, limit)
        return False
    at = 0
    for call in calls:
        count = len(call.plan.ranks)
        call.conclude_with(outputs[at : at + count])
        at += count
    return True


def _refs_of(calls: Sequence[Call]) -> list[Ref] | None:
    """Return the references of all outputs; None where each call is to be waited for by itself."""
    if len(calls) < 2:
        return None
    core, decodes = calls[0].core, calls[0].decodes
    refs: list[Ref] = []
    for call in calls:
        here = None if call.over or call.deadline is not None else call.arrivals.fetched_with_others()
        if here is None or call.core is not core or call.decodes is not decodes:
            return None
        refs += here
    return refs


def _tell_first(calls: Sequence[Call], limit: float | None) -> None:
    """Raise the error of a call that failed, or was not over in time; the others go on."""
    backend = calls[0].core.backend
    for call in calls:
        if call.has_failed():
            call.result(None)
    for call in calls:
        call.result(seconds_until(limit, backend))
