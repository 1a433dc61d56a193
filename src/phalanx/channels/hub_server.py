"""Serves a hub to other processes: a thread for each connection.

A connection stands for the process at its other end: the end of the connection is the death of that process.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from functools import partial
from multiprocessing import AuthenticationError
from typing import Any

from phalanx.channels.hub import Hub
from phalanx.channels.hub_connection import HubAddress, HubConnection

_AUTHENTICATES_WITHIN_S = 10.0
_MOST_UNAUTHENTICATED = 64
_log = logging.getLogger("phalanx")


class HubServer:
    """Accepts connections to a hub until it is stopped."""

    def __init__(self, hub: Hub, host: str) -> None:
        self._hub = hub
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=1024)
        self.address = HubAddress(host, self._listening.getsockname()[1], secrets.token_bytes(32))
        self._unauthenticated = threading.BoundedSemaphore(_MOST_UNAUTHENTICATED)
        threading.Thread(target=self._accept, name="phalanx-hub", daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections. Existing connections are served until their peers end."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.1)  # out of descriptors: connections that end free some
                continue
            if self._unauthenticated.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="phalanx-hub", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        connection = HubConnection(sock, may_wait=False)
        name = self._authenticate(connection)
        if name is not None:
            self._hub.connect(name, lambda number: connection.send((None, number)))
            self._serve_peer(name, connection)
            self._hub.peer_died(name, "its process ended")
        connection.close()

    def _authenticate(self, connection: HubConnection) -> str | None:
        """Return the name of the peer, None if it does not know the key or does not prove it in time."""
        deadline = threading.Timer(_AUTHENTICATES_WITHIN_S, connection.shut_down)
        deadline.daemon = True
        deadline.start()
        try:
            return connection.accept(self.address.key)
        except (OSError, EOFError, AuthenticationError, ValueError, AssertionError):
            return None
        finally:
            deadline.cancel()
            self._unauthenticated.release()

    def _serve_peer(self, name: str, connection: HubConnection) -> None:
        def answer(ticket: int, result: Any) -> None:
            connection.send((ticket, result))

        try:
            while True:
                for ticket, is_answered, key, verb, args in connection.receive():
                    self._hub.ask(
                        (name, ticket), partial(answer, ticket) if is_answered else None, key, verb, args
                    )
        except (OSError, EOFError):
            return
        except Exception:
            _log.warning(
                "a message of %s to its channels is damaged; it is disconnected", name, exc_info=True
            )


_served: list[HubServer] = []


def start_hub(host: str) -> HubAddress:
    """Serve a hub of this process, which does nothing else."""
    _served.append(HubServer(Hub(), host))
    return _served[0].address
