"""Calls whose streams were left before their end: they are cancelled."""

from __future__ import annotations

import contextlib
from collections import deque

from phalanx.calls.call import Call
from phalanx.errors import PhalanxError
from phalanx.session.background import Background


def leave(call: Call) -> None:
    """Cancel a call that streams, and wait until it has ended on its ranks."""
    with contextlib.suppress(PhalanxError):  # its group, or its epoch, is gone: then so is the call
        call.cancel()
    if call.streams is not None:
        call.streams.leave()
    call.end_with(None)  # where it was over on all ranks, and only its items had not been read


def leave_soon(call: Call) -> None:
    """The same for one that nobody holds any more; does not wait where that takes time."""
    if call.core.backend.immediate:
        leave(call)
        return
    _left.append(call)
    _background.begin()


def _turn() -> None:
    while _left:
        leave(_left.popleft())


_left: deque[Call] = deque()
_background = Background(_turn)
