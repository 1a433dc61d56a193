"""Calls to single ranks, sent as actor methods under the names that users know; items come by streaming generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import ObjectRef

from phalanx.backends.actor_methods import bare_name, facade_name
from phalanx.backends.backend_types import Endpoint, Ref, Ticket
from phalanx.backends.ray import private
from phalanx.wire.call_page import BARE_CALLS
from phalanx.wire.messages import BARE, OUTPUT, packed_bare


def submit(
    endpoint: Endpoint,
    role: str,
    method: str,
    data: bytes,
    refs: Sequence[Ref],
    returns: int = OUTPUT,
) -> Ticket:
    """Send one call to a rank; see ``Calling.submit``."""
    handle = endpoint.handle
    if data == BARE:
        name = facade_name(role, method)
        bare = endpoint.methods.get(name)
        if bare is None:
            bare = endpoint.methods[name] = _no_argument_method(handle, name)
        number = endpoint.bare_calls + 1  # counted once it was sent: the rank counts the calls that arrive
        if bare:
            ticket = Ticket(private.call(handle, bare[0], name=bare[1]))
            endpoint.bare_calls = number
            return ticket
        data = packed_bare(BARE_CALLS + number, role, method)
        endpoint.bare_calls = number
    key = f"{role}/{method}"
    target = endpoint.methods.get(key)
    if target is None:
        found = facade_name(role, method)
        target = endpoint.methods[key] = found if hasattr(handle, found) else "_px_call"
    args = (data, list(refs)) if refs else (data,)
    if returns == OUTPUT:
        return Ticket(private.call(handle, target, *args))
    info, value = private.call(handle, target, *args, returns=returns)
    return Ticket(value, info)


def _no_argument_method(handle: Any, name: str) -> tuple[str, str] | tuple[()]:
    """Return the method for a call without arguments and the task's name; empty if the process has none."""
    found = bare_name(name)
    return (found, f"{private.class_name(handle)}.{name}") if hasattr(handle, found) else ()


class RayStream:
    """One rank's items. Ray stops the producer at so many that were not taken.

    Dropping Ray's generator stops nobody; it even lets the producer run on. So a stream that is left is cancelled, and
    then read to its end.
    """

    def __init__(self, generator: private.ObjectRefGenerator) -> None:
        self.coming = generator
        self.ended: ObjectRef = generator.completed()

    def take(self) -> Ref | None:
        return next(self.coming, None) if self.coming.next_ready() else None

    def leave(self) -> None:
        """Nothing to do: whoever left it takes what is there, and thereby lets the rank go on to its end."""


def stream(
    endpoint: Endpoint,
    role: str,
    method: str,
    data: bytes,
    refs: Sequence[Ref],
    buffer: int | None,
) -> RayStream:
    """Send a call of a method that yields, under the method name that users know."""
    name = f"{private.class_name(endpoint.handle)}.{facade_name(role, method)}"
    args = (data, list(refs)) if refs else (data,)
    items = private.call(endpoint.handle, "_px_stream", *args, name=name, returns="streaming", buffer=buffer)
    return RayStream(items)
