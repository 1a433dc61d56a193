"""How a producer ends: what it has is delivered first, or handed over to the home."""

from __future__ import annotations

import concurrent.futures
import weakref
from typing import Any

from phalanx.channels.live_channels import ChannelCard
from phalanx.channels.payloads import kept
from phalanx.channels.service_client import port_to
from phalanx.channels.services import Port
from phalanx.worker.exit_hooks import Closers, at_close, current_closers

_LEAVES_WITHIN_S = 4.0  # less than a rank has for being closed
_HANDS_OVER_WITHIN_S = 60.0  # less than one has that leaves a group which goes on
_leaving: weakref.WeakKeyDictionary[Closers, set[str]] = weakref.WeakKeyDictionary()


class Listener:
    """What a home tells of its own accord to those who put."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, note: Any) -> None:
        if note[0] == "freed":
            kept.drop(note[1])
        else:
            kept.drop_all(self._key)


def leave(port: Port, key: str, handoff: bool, timeout: float | None) -> bool:
    """Put no more, and wait until nothing of this process is needed; whether that is so."""
    try:
        port.ask(key, "leave", handoff).future.result(timeout)
    except concurrent.futures.TimeoutError:  # the built-in one from Python 3.11 on
        return False
    return True


def leave_at_close(card: ChannelCard) -> None:
    """Have this rank leave the channel when it is closed; what is not delivered in time then is lost, and counted.

    A rank that leaves a group which goes on hands over what it has.
    """
    closers = current_closers()
    if closers is None or card.key in _leaving.setdefault(closers, set()):
        return
    _leaving[closers].add(card.key)
    handoff = card.handoff or card.address is None  # inline, nobody could take it meanwhile
    at_close(_end, closers, port_to(card.key, card.address), card.key, handoff)


def _end(closers: Closers, port: Port, key: str, handoff: bool) -> None:
    within = _HANDS_OVER_WITHIN_S if closers.hands_over else _LEAVES_WITHIN_S
    leave(port, key, handoff or closers.hands_over, within)
