"""What a process offers to others: homes of channels and the like, each asked by verbs and answered by tickets.

A process that asks is a *peer* of the service: this one, an inline rank in it, or another one over a connection
(:mod:`server`, :mod:`connection`). One name stands for one incarnation: a process that connects again is another.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.worker.exit_hooks import Closers, current_closers

Answer = Callable[[Any], None]
_serial = itertools.count()


@dataclass(frozen=True)
class Failed:
    """The answer to a request that raised at its home; ``why`` is what it raised."""

    why: str


class Peer(Protocol):
    """A process, as a service sees it."""

    @property
    def name(self) -> str:
        """Names this incarnation of it; what is before the last "#" is for people."""
        ...

    def tell(self, service: str, note: Any) -> None:
        """Let it know of something that it did not ask for; does not wait."""
        ...


class Service(Protocol):
    """Something that lives in this process and is asked by others. All may be called by any thread."""

    @property
    def key(self) -> str:
        """Its name among all services of this process."""
        ...

    def ask(
        self, peer: Peer, ticket: Hashable, answer: Answer | None, verb: str, args: Sequence[Any]
    ) -> None:
        """Take a request in; ``answer`` may be called now or later, once, by any thread."""
        ...

    def left(self, peer: Peer, why: str) -> None:
        """The process of a peer ended."""
        ...

    def tick(self) -> float | None:
        """Answer those whose deadline is over; seconds until the next one, None if there is none."""
        ...


def of_one_process(key: str, other: str) -> bool:
    """Whether two services are of the same process: their keys are ``kind/process/number``."""
    return key.split("/")[1] == other.split("/")[1]


def shown(name: str) -> str:
    """A peer's name as people know it."""
    return name.rpartition("#")[0] or name


def described() -> str:
    """This process, or the rank whose code this is, in words."""
    closers = current_closers()
    place = closers.place if closers is not None and closers.place else "the process"
    return f"{place} (host {socket.gethostname()}, pid {os.getpid()})"


def named() -> str:
    """A name for an incarnation of this process or rank."""
    return f"{described()}#{next(_serial)}"


class Services:
    """The services of this process, by key."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self._lock = threading.Lock()

    def add(self, service: Service) -> None:
        """Offer a service."""
        with self._lock:
            self._services[service.key] = service

    def remove(self, service: Service) -> None:
        """Offer it no longer."""
        with self._lock:
            self._services.pop(service.key, None)

    def get(self, key: str) -> Service | None:
        """The service of that key."""
        return self._services.get(key)

    def all(self) -> list[Service]:
        """All that are offered."""
        with self._lock:
            return list(self._services.values())

    def left(self, peer: Peer, why: str) -> None:
        """Tell all of them that a process ended."""
        for service in self.all():
            service.left(peer, why)

    def tick(self) -> float | None:
        """Seconds until one of them has a deadline."""
        due = [seconds for service in self.all() if (seconds := service.tick()) is not None]
        return min(due, default=None)


services = Services()
"""Those of this process."""


@dataclass(frozen=True)
class Reply:
    """An answer that is not here yet, and the ticket by which it can be called off."""

    ticket: int
    future: Future[Any]


class Port(Protocol):
    """A way to services, of this process or of another one."""

    @property
    def peer(self) -> str:
        """Names this process, or rank, there; empty while nothing has been asked."""
        ...

    def ask(self, key: str, verb: str, *args: Any) -> Reply:
        """Send a request."""
        ...

    def say(self, key: str, verb: str, *args: Any) -> None:
        """Send one that has no answer."""
        ...

    def hear(self, key: str, listener: Callable[[Any], None]) -> None:
        """Have what a service tells of its own accord passed on."""
        ...


class LocalPort:
    """The services of this process itself, for one rank in it or for the process as a whole."""

    def __init__(self) -> None:
        self.name = named()
        self._tickets = itertools.count()
        self._listeners: dict[str, Callable[[Any], None]] = {}

    @property
    def peer(self) -> str:
        return self.name

    def tell(self, service: str, note: Any) -> None:
        listener = self._listeners.get(service)
        if listener is not None:
            listener(note)

    def hear(self, key: str, listener: Callable[[Any], None]) -> None:
        self._listeners[key] = listener

    def ask(self, key: str, verb: str, *args: Any) -> Reply:
        reply = Reply(next(self._tickets), Future())
        service = services.get(key)
        if service is None:
            reply.future.set_result(("gone", "it was closed"))
        else:
            service.ask(self, (self.name, reply.ticket), reply.future.set_result, verb, args)
        return reply

    def say(self, key: str, verb: str, *args: Any) -> None:
        service = services.get(key)
        if service is not None:
            service.ask(self, None, None, verb, args)


class LocalPorts:
    """One for this process, and one for each inline rank in it."""

    def __init__(self) -> None:
        self._own: tuple[int, LocalPort] | None = None
        self._of_ranks: weakref.WeakKeyDictionary[Closers, LocalPort] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def current(self) -> LocalPort:
        """That of the code that asks."""
        closers = current_closers()
        with self._lock:
            if closers is None:
                if self._own is None or self._own[0] != os.getpid():
                    self._own = (os.getpid(), LocalPort())
                return self._own[1]
            port = self._of_ranks.get(closers)
            if port is None:
                port = self._of_ranks[closers] = LocalPort()
                closers.if_lost.append(lambda why, port=port: services.left(port, why))
            return port


local_ports = LocalPorts()
"""Those of this process."""
