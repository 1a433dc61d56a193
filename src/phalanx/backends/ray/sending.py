"""Calls to single ranks, sent as tasks under the names that users know; items come by streaming generators."""

from __future__ import annotations

from typing import Any

from ray import ObjectRef

from phalanx.backends.backend_types import Endpoint, Ref, Ticket
from phalanx.backends.ray import private
from phalanx.wire.messages import OUTPUT, Message


def submit(endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> Ticket:
    """Send one call to a rank; see ``Calling.submit``."""
    handle, name = endpoint.handle, _task_name(endpoint, message)
    if not message.data:
        return Ticket(private.call(handle, "_px_named_call", name=name))
    sent = private.call(handle, "_px_call", *_arguments(message), name=name, returns=returns)
    if returns == OUTPUT:
        return Ticket(sent)
    info, value = sent
    return Ticket(value, info)


def _arguments(message: Message) -> tuple[Any, ...]:
    """Return what a rank is sent beside the name of the task, which is all there is of most calls."""
    if message.refs:
        return message.data, list(message.refs)
    return (message.data,) if message.data else ()


def _task_name(endpoint: Endpoint, message: Message) -> str:
    """Return the name of the call after that of the class, as dashboards show it."""
    return f"{private.class_name(endpoint.handle)}.{message.name}"


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


def stream(endpoint: Endpoint, message: Message, buffer: int | None) -> RayStream:
    """Send a call of a method that yields."""
    items = private.call(
        endpoint.handle,
        "_px_stream",
        *_arguments(message),
        name=_task_name(endpoint, message),
        returns="streaming",
        buffer=buffer,
    )
    return RayStream(items)
