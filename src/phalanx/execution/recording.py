"""A rank's part of ``group.record``: the inputs of its calls, kept until the driver fetches them."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.errors import InternalError
from phalanx.execution.hooks import End, Seen, Wanted
from phalanx.execution.host import Host
from phalanx.wire.codec import encode
from phalanx.wire.messages import RankSetup


@dataclass(frozen=True)
class RecordOrder:
    """What to record: the next ``calls`` that fit, all of them or only those that raise."""

    calls: int
    wanted: Wanted
    when: Literal["call", "error"] = "call"
    state: bool = False


@dataclass(frozen=True)
class RecordedCall:
    """One call as a rank got it: ``body`` holds the encoded (args, kwargs), as the method received them.

    ``state`` is what the worker objects of the process were before it, encoded; ``error`` the traceback of what the
    call raised.
    """

    role: str
    method: str
    body: bytes
    state: bytes | None
    error: str
    at: float
    to_device: bool


@dataclass(frozen=True)
class RankRecording:
    """What a rank gives back: its place in the group, its calls, and where it found its modules."""

    setup: RankSetup
    calls: tuple[RecordedCall, ...]
    notes: tuple[str, ...]
    path: tuple[str, ...]
    folder: str
    python: str
    torch: str | None


class CallCapture:
    """The hook. Arguments are decoded anew for the file, so that what a method does to its own does not show."""

    def __init__(self, host: Host, order: RecordOrder) -> None:
        self._host = host
        self._order = order
        self._begun = 0
        self._calls: list[RecordedCall] = []
        self._notes: list[str] = []

    def begin(self, seen: Seen) -> End | None:
        order = self._order
        counted = self._begun if order.when == "call" else len(self._calls)
        if counted >= order.calls or not order.wanted.fits(seen):
            return None
        self._begun += 1
        state = self._state(seen) if order.state else None
        at = time.time()

        def end(error: BaseException | None) -> None:
            if order.when == "call" or isinstance(error, Exception):
                self._keep(seen, state, error, at)

        return end

    def finish(self) -> RankRecording:
        setup = self._host.place
        if setup is None:
            raise InternalError("a call was recorded before the process was a rank; please report this")
        torch = sys.modules.get("torch")
        return RankRecording(
            setup=setup,
            calls=tuple(self._calls),
            notes=tuple(self._notes),
            path=tuple(sys.path),
            folder=os.getcwd(),
            python=platform.python_version(),
            torch=None if torch is None else str(torch.__version__),
        )

    def _keep(self, seen: Seen, state: bytes | None, error: BaseException | None, at: float) -> None:
        try:
            args, kwargs = seen.again()
            body = encode((tuple(args), kwargs)).to_bytes()
        except Exception as failure:
            self._notes.append(f"{seen.name} could not be recorded: {failure}")
            return
        text = "" if error is None else "".join(traceback.format_exception(error))
        self._calls.append(RecordedCall(seen.role, seen.method, body, state, text, at, seen.to_device))

    def _state(self, seen: Seen) -> bytes | None:
        try:
            found = {role: state_of(instance) for role, instance in self._host.instances.items()}
            return encode(found).to_bytes()
        except Exception as failure:
            self._notes.append(f"the state before {seen.name} could not be recorded: {failure}")
            return None


def state_of(instance: Any) -> tuple[str, Any]:
    """A worker's state: its ``state_dict()`` where it can be loaded again, else the object itself, to be pickled."""
    if callable(getattr(instance, "state_dict", None)) and callable(
        getattr(instance, "load_state_dict", None)
    ):
        return "state_dict", instance.state_dict()
    return "object", instance


def arm_recording(host: Host, key: str, order: RecordOrder) -> None:
    """Runs on the rank: keep its next calls."""
    host.hooks.add(key, CallCapture(host, order))


def end_recording(host: Host, key: str) -> RankRecording:
    """Runs on the rank: keep no more calls, and give those kept."""
    return host.hooks.take(key).finish()
