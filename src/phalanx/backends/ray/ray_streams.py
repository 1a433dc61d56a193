"""Calls whose items come one by one, by Ray's streaming generators."""

from __future__ import annotations

from collections.abc import Sequence

from ray import ObjectRef

from phalanx.backends.actor_methods import facade_name
from phalanx.backends.backend_types import Endpoint, Ref
from phalanx.backends.ray import private


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
