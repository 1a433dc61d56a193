"""Waiting for the answer to a request at a home, with a deadline, until it is called off."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import thread as futures
from typing import Any

from phalanx.errors import ChannelEmpty, ChannelFull, StalenessTimeout
from phalanx.runtime.links.services import LocalPort, Port, Reply, services
from phalanx.tracing.spans import span

_LATE_S = 10.0  # within which a home that lives says that a deadline passed
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
            return _waited(reply.future, port, timeout)
    except BaseException:
        _call_off(key, port, reply)
        raise


async def answered_async(key: str, port: Port, reply: Reply, timeout: float | None) -> Any:
    """The same in an event loop."""
    try:
        future = asyncio.wrap_future(reply.future)
        if timeout is None:
            return await future
        done, _ = await asyncio.wait(
            [future], timeout=timeout if isinstance(port, LocalPort) else timeout + _LATE_S
        )
        if not done and isinstance(port, LocalPort):
            services.tick()
        if not reply.future.done():
            _call_off(key, port, reply)
            return OVERDUE
        return reply.future.result()
    except BaseException:
        _call_off(key, port, reply)
        raise


def _waited(future: Future[Any], port: Port, timeout: float | None) -> Any:
    if timeout is None:
        return future.result()
    if not isinstance(port, LocalPort):
        try:
            return future.result(timeout + _LATE_S)
        except TimeoutError:
            return OVERDUE
    until = time.monotonic() + timeout
    while True:
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            services.tick()


def _call_off(key: str, port: Port, reply: Reply) -> None:
    """Wait no longer; what is given all the same goes back."""

    def back(future: Future[Any]) -> None:
        what = future.result()
        if what[0] == "given":
            port.say(key, "back", what[1], frozenset())
        elif what[0] == "begun":
            port.say(key, "end", what[1], "its producer waits no longer")

    port.say(key, "cancel", reply.ticket)
    reply.future.add_done_callback(back)


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
