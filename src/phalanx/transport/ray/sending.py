"""One call to one rank: an actor's method, as its users know it; from the driver, or from a relay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.transport.facade import bare_name, facade_name
from phalanx.transport.values import Endpoint, Ref, Ticket
from phalanx.wire.messages import BARE, packed_bare
from phalanx.wire.outputs import OUTPUT
from phalanx.wire.side_channel import BARE_CALLS

_NOT_LISTED = {"enable_task_events": False}


def submit(
    endpoint: Endpoint,
    role: str,
    method: str,
    data: bytes,
    refs: Sequence[Ref],
    returns: int = OUTPUT,
    *,
    listed: bool = True,
    after: Sequence[Ref] = (),
) -> Ticket:
    """Send one call to a rank; see ``Calling.submit``. It begins once all of ``after`` are there.

    Ray lists its calls, as its dashboard and ``ray list tasks`` show them, unless they are not to be ``listed``.
    """
    if data == BARE:
        number = endpoint.bare_calls + 1  # counted once it was sent: the rank counts those that came
        key = role + "//" + method
        bare = (
            endpoint.methods[key] if key in endpoint.methods else _bare_method(endpoint, role, method, listed)
        )
        try:
            if bare is not None and not after:
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
        remote = endpoint.methods[key] = _message_method(endpoint, role, method, returns, listed)
    args = (data, list(refs), *after) if refs or after else (data,)
    if returns == OUTPUT:
        return Ticket(remote.remote(*args))
    info, *outputs = remote.remote(*args)
    return Ticket(outputs[0], info, *outputs[1:])


def _message_method(endpoint: Endpoint, role: str, method: str, returns: int, listed: bool) -> Any:
    """The process's method for a call with a message that gives back so many objects."""
    handle = endpoint.handle
    found = getattr(handle, facade_name(role, method), None) or handle._px_call
    options: dict[str, Any] = {} if listed else dict(_NOT_LISTED)
    if returns != OUTPUT:
        options["num_returns"] = returns
    return found.options(**options) if options else found


def _bare_method(endpoint: Endpoint, role: str, method: str, listed: bool) -> Any | None:
    """The process's method for the call without arguments, under the name that users know; None if it has none."""
    name = facade_name(role, method)
    found = getattr(endpoint.handle, bare_name(name), None)
    if found is not None:
        found = found.options(name=f"{class_name(endpoint)}.{name}", **({} if listed else _NOT_LISTED))
    endpoint.methods[role + "//" + method] = found
    return found


def class_name(endpoint: Endpoint) -> str:
    """What users know its class by."""
    return endpoint.handle._ray_actor_creation_function_descriptor.class_name
