"""Calls to single ranks, sent as actor methods under the names that users know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.backends.actor_methods import bare_name, facade_name
from phalanx.backends.backend_types import Endpoint, Ref, Ticket
from phalanx.wire.call_page import BARE_CALLS
from phalanx.wire.messages import BARE, packed_bare
from phalanx.wire.outputs import OUTPUT


def submit(
    endpoint: Endpoint,
    role: str,
    method: str,
    data: bytes,
    refs: Sequence[Ref],
    returns: int = OUTPUT,
) -> Ticket:
    """Send one call to a rank; see ``Calling.submit``."""
    if data == BARE:
        number = endpoint.bare_calls + 1  # counted once it was sent: the rank counts those that came
        key = role + "//" + method
        bare = endpoint.methods[key] if key in endpoint.methods else _bare_method(endpoint, role, method)
        try:
            if bare is not None:
                ticket = Ticket(bare.remote())
                endpoint.bare_calls = number
                return ticket
        except TypeError:
            # Ray's own tracing is on: it adds an argument, which methods of a class do not take.
            endpoint.methods[key] = None
        data = packed_bare(BARE_CALLS + number, role, method)
        endpoint.bare_calls = number
    key = f"{role}/{method}/{returns}"
    remote = endpoint.methods.get(key)
    if remote is None:
        remote = endpoint.methods[key] = _message_method(endpoint, role, method, returns)
    args = (data, list(refs)) if refs else (data,)
    if returns == OUTPUT:
        return Ticket(remote.remote(*args))
    info, value = remote.remote(*args)
    return Ticket(value, info)


def _message_method(endpoint: Endpoint, role: str, method: str, returns: int) -> Any:
    """Return the process's method for a call with a message that returns ``returns`` objects."""
    handle = endpoint.handle
    found = getattr(handle, facade_name(role, method), None) or handle._px_call
    return found if returns == OUTPUT else found.options(num_returns=returns)


def _bare_method(endpoint: Endpoint, role: str, method: str) -> Any | None:
    """The process's method for the call without arguments, under the name that users know; None if it has none."""
    name = facade_name(role, method)
    found = getattr(endpoint.handle, bare_name(name), None)
    if found is not None:
        found = found.options(name=f"{class_name(endpoint)}.{name}")
    endpoint.methods[role + "//" + method] = found
    return found


def class_name(endpoint: Endpoint) -> str:
    """What users know its class by."""
    return endpoint.handle._ray_actor_creation_function_descriptor.class_name
