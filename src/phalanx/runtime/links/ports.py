"""The way from here to a service, wherever that lives."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.runtime.links.connection import Address, connections
from phalanx.runtime.links.server import one_server
from phalanx.runtime.links.services import Port, local_ports, services
from phalanx.transport.base import Transport

__all__ = ["Address", "port_to", "served"]


def served(transport: Transport) -> tuple[Address | None, Callable[[], None]]:
    """Where other processes reach the services of this one (None where there are none); what to call when one of
    these has a deadline sooner than before."""
    if transport.immediate:
        return None, lambda: None
    server = one_server.get(transport.host())
    return Address(*server.address, server.token), server.wake


def port_to(key: str, address: Address | None) -> Port:
    """To the service of that key: in this process, or at that address."""
    if address is None or services.get(key) is not None:
        return local_ports.current()
    return connections.to(address)
