"""Waiting for the answer to a request at a home, with a deadline, until it is called off."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import thread as futures
from typing import Any

from phalanx.channels.payloads import InStore, Packed, kept
from phalanx.channels.services import LocalPort, Port, Reply, services
from phalanx.errors import ChannelEmpty, ChannelFull, StalenessTimeout
from phalanx.tracing.spans import span

_LATE_S = 10.0  # within which a home that lives says that a deadline passed
_SOON_S = 0.001
CALLED_OFF = "its put was called off"
"""The reason under which items are dropped that were in when whoever put them waited no longer."""
OVERDUE = ("gone", "the process that owns it does not answer")


_POOL_WAITS: Any = getattr(futures, "_worker").__code__  # noqa: B009
"""In which a thread of a pool is, with nothing above it, while there is no work."""


class Others:
    """The threads of this process that use a channel: whether another one could end a wait of this one."""

    def __init__(self) -> None:
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def note(self) -> None:
        """This thread uses it."""
        self._threads.add(threading.current_thread())

    def may_act(self) -> bool:
        """Whether there is a thread that used it, or one that the interpreter would wait for."""
        me = threading.current_thread()
        return any(
            one is not me and (one in self._threads or not (one.daemon or _is_idle(one)))
            for one in threading.enumerate()
        )


def _is_idle(thread: threading.Thread) -> bool:
    """Whether it is one of the library's own, a timer, or a thread of a pool that waits for work."""
    if isinstance(thread, threading.Timer) or thread.name.startswith("phalanx-"):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _POOL_WAITS


others = Others()
"""Those of this process."""


def answered(key: str, port: Port, reply: Reply, timeout: float | None, verb: str, channel: str) -> Any:
    """Wait for an answer.

    Raises:
        ChannelFull, ChannelEmpty, StalenessTimeout: nothing that could bring it about runs beside this thread.
    """
    if reply.future.done():
        return reply.future.result()
    try:
        if isinstance(port, LocalPort) and _is_inline(key) and not others.may_act():
            raise _hopeless(verb, channel)
        with span(f"{verb} waits", channel=channel):
            what = _waited(reply.future, port, timeout)
        if what is OVERDUE:
            _call_off(key, port, reply)
        return what
    except BaseException:
        _call_off(key, port, reply)
        raise


async def answered_async(key: str, port: Port, reply: Reply, timeout: float | None) -> Any:
    """The same in an event loop."""
    local = isinstance(port, LocalPort)
    try:
        seconds = timeout if timeout is None or local else timeout + _LATE_S
        while not await _is_done(reply.future, seconds):
            if not local:
                _call_off(key, port, reply)
                return OVERDUE
            services.tick()
            seconds = _SOON_S
        return reply.future.result()
    except BaseException:
        _call_off(key, port, reply)
        raise


async def _is_done(future: Future[Any], seconds: float | None) -> bool:
    """Wait for it in an event loop. Cancelling the wait must not cancel it: its answer is still to be heard."""
    loop = asyncio.get_running_loop()
    here: asyncio.Future[None] = loop.create_future()

    def done() -> None:
        if not here.done():
            here.set_result(None)

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(done)

    future.add_done_callback(tell)
    await asyncio.wait([here], timeout=seconds)
    return future.done()


def _waited(future: Future[Any], port: Port, timeout: float | None) -> Any:
    if timeout is None:
        return future.result()
    if not isinstance(port, LocalPort):
        try:
            return future.result(timeout + _LATE_S)
        except concurrent.futures.TimeoutError:  # the built-in one from Python 3.11 on
            return OVERDUE
    until = time.monotonic() + timeout
    while True:
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except concurrent.futures.TimeoutError:
            services.tick()


def _call_off(key: str, port: Port, reply: Reply) -> None:
    """Wait no longer; what is given all the same goes back."""

    def back(future: Future[Any]) -> None:
        if future.exception() is not None:
            return
        what = future.result()
        if what[0] == "given":
            port.say(key, "back", what[1], frozenset())
        elif what[0] == "begun":
            port.say(key, "end", what[1], "its producer waits no longer")

    port.say(key, "cancel", reply.ticket)
    reply.future.add_done_callback(back)


def take_back(key: str, port: Port, packed: Packed, reply: Reply) -> None:
    """Keep nothing of an item whose put failed. It may be in all the same: then it is dropped, and counted."""

    def answered_at_last(future: Future[Any]) -> None:
        kind, *rest = ("failed",) if future.exception() is not None else future.result()
        if kind == "accepted":
            port.say(key, "drop", CALLED_OFF, (rest[0],))
        elif isinstance(packed.payload, InStore):
            kept.drop([packed.payload.key])

    reply.future.add_done_callback(answered_at_last)


def _is_inline(key: str) -> bool:
    service: Any = services.get(key)
    return service is not None and service.alone


def _hopeless(verb: str, channel: str) -> Exception:
    if verb == "begin":
        return StalenessTimeout(
            "begin(): training is too far behind for these rows, and on the inline backend nothing else runs while "
            "this waits, so that it would never catch up; train and advance() first, or use the ray backend"
        )
    if verb == "put":
        return ChannelFull(
            f"channel {channel!r}: it is full, and on the inline backend nothing else runs while this put waits, so "
            "that there would never be room; take first, give the channel a larger maxsize, or use the ray backend",
            channel=channel,
        )
    return ChannelEmpty(
        f"channel {channel!r}: it has not as much as was asked for, and on the inline backend nothing else runs while "
        "this take waits, so that nothing would ever come; put first, or use the ray backend",
        channel=channel,
    )
