"""The way from here to a service, wherever that lives."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.backends.api import Backend
from phalanx.channels.payloads import PROCESS
from phalanx.channels.server import one_server
from phalanx.channels.service_connection import Address, connections
from phalanx.channels.services import Port, local_ports, of_one_process, services
from phalanx.errors import DeclarationError

__all__ = ["Address", "port_to", "served"]


def served(transport: Backend) -> tuple[Address | None, Callable[[], None]]:
    """Where other processes reach the services of this one (None where there are none); what to call when one of
    these has a deadline sooner than before."""
    if transport.immediate:
        return None, lambda: None
    server = one_server.get(transport.host())
    return Address(*server.address, server.token), server.wake


def port_to(key: str, address: Address | None) -> Port:
    """To the service of that key: in this process, or at that address.

    Raises:
        DeclarationError: another process has it, in which everything is inline.
    """
    if address is not None and services.get(key) is None:
        return connections.to(address)
    if address is None and not of_one_process(key, f"/{PROCESS}/"):
        raise DeclarationError(
            f"this {key.split('/')[0]} was made on the inline backend, which no other process reaches; make it on "
            "that of the groups that use it: backend='ray', or PHALANX_BACKEND for all"
        )
    return local_ports.current()
