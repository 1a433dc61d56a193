"""End of a producer: its items are delivered first, or their bytes are moved to the hub."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import time
import weakref

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import FetchFailed
from phalanx.channels.hub_client import HubClient
from phalanx.channels.live_channels import ChannelHandle
from phalanx.channels.payloads import stored_items, to_bytes
from phalanx.worker.exit_hooks import Closers, at_close, current_closers

_CLOSES_WITHIN_S = 4.0  # less than the time in which a rank has to close
_LEAVES_WITHIN_S = 60.0  # less than the time in which a rank has to leave a group that continues
_MOVES_EVERY_S = 0.1
_registered: weakref.WeakKeyDictionary[Closers, set[str]] = weakref.WeakKeyDictionary()


def leave(client: HubClient, backend: Backend, key: str, handoff: bool, timeout: float | None) -> bool:
    """Reject further puts of this process, and wait until the channel needs none of its items.

    With ``handoff``, the bytes of its items are moved to the hub. Return False after the timeout.
    """
    limit = math.inf if timeout is None else time.monotonic() + timeout
    left = client.ask(key, "leave")[1]
    while True:
        if handoff and not left.done():
            held = client.request(key, "held")
            for number, payload in held[1] if held[0] == "held" else ():
                with contextlib.suppress(FetchFailed):
                    client.send(key, "move", number, to_bytes(backend, payload))
        try:
            left.result(min(_MOVES_EVERY_S, max(0.0, limit - time.monotonic())))
        except concurrent.futures.TimeoutError:  # the built-in one from Python 3.11 on
            if time.monotonic() >= limit:
                return False
        else:
            stored_items.reclaim_channel(key)
            return True


def leave_at_exit(client: HubClient, backend: Backend, handle: ChannelHandle) -> None:
    """Have this rank leave the channel when it is closed. Items that are not delivered in time are lost.

    A rank that leaves a group which continues moves its items to the hub.
    """
    closers = current_closers()
    if closers is None or handle.key in _registered.setdefault(closers, set()):
        return
    _registered[closers].add(handle.key)
    handoff = (
        handle.handoff or handle.address is None
    )  # on the inline backend no consumer could take them meanwhile
    at_close(_leave_within, closers, client, backend, handle.key, handoff)


def _leave_within(closers: Closers, client: HubClient, backend: Backend, key: str, handoff: bool) -> None:
    timeout = _LEAVES_WITHIN_S if closers.hands_over else _CLOSES_WITHIN_S
    leave(client, backend, key, handoff or closers.hands_over, timeout)
