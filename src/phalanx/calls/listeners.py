"""Listeners of the steps of a call, such as a trace. Counts, metrics and reruns are recorded by the call itself.

A listener is a subclass of :class:`CallListener` that overrides some steps, and is added to :data:`everywhere`. The
list is read once per call, when it is planned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.calls.call_state import Results
from phalanx.dispatch.plan import CallPlan
from phalanx.group.epoch import Epoch
from phalanx.wire.messages import Message

_log = logging.getLogger("phalanx")


class CallInfo(Protocol):
    """A call, as its listeners and its diagnosis know it.

    ``began`` is when its caller began to plan it, in nanoseconds since 1970 (0: not noted), ``started`` when it was
    made, on the backend's clock. ``trace`` may be set at ``planned``, and goes out with the messages. A call that could
    not be sent ends too.
    """

    core: Any  # the Group, whose module imports this module
    epoch: Epoch
    role: str
    method: str
    number: int
    plan: CallPlan
    arrivals: Results
    began: int
    started: float
    limit: float | None
    deadline: float | None
    acts: bool
    is_init: bool
    was_sent: bool
    trace: str
    error: BaseException | None
    cancelling: threading.Event | None


class CallListener:
    """Base of listeners. Each method is called on the thread that takes the step, and should be quick.

    A listener that raises is removed, which is reported once; the call continues.
    """

    def planned(self, call: CallInfo) -> None:
        """Its plan is made; nothing is encoded yet."""

    def passed(self, call: CallInfo, source: CallInfo) -> None:
        """The result of another call is among its arguments."""

    def stored(self, call: CallInfo, nbytes: int) -> None:
        """A value of ``nbytes`` was stored for the call."""

    def composed(self, call: CallInfo, message: Message) -> None:
        """The message of the next rank is made."""

    def posted(self, call: CallInfo) -> None:
        """The message of a rank was handed over."""

    def sent(self, call: CallInfo, nbytes: int) -> None:
        """All messages of the call were sent, of ``nbytes`` in all."""

    def asked(self, call: CallInfo) -> None:
        """Somebody waits for its end."""

    def arrived(self, call: CallInfo, rank: int | None) -> None:
        """The output of a rank is here; None: of all."""

    def joined(self, call: CallInfo) -> None:
        """Its value is made from the outputs."""

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        """The end of the call is known: it succeeded (None), or raised ``error``. Called once."""


STEPS = tuple(name for name in vars(CallListener) if not name.startswith("_"))


class Heard:
    """The hooks of some listeners, a tuple for each step."""

    if TYPE_CHECKING:

        def __getattr__(self, step: str) -> tuple[Callable[..., None], ...]: ...

    def __init__(self, listeners: Sequence[CallListener] = ()) -> None:
        for step in STEPS:
            silent = getattr(CallListener, step)
            hooks = (getattr(one, step) for one in listeners if getattr(type(one), step) is not silent)
            setattr(self, step, tuple(hooks))


class Listeners:
    """A list of listeners; ``heard`` has the hooks for calls that are planned now, by step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.all: tuple[CallListener, ...] = ()
        self.heard = Heard()

    def add(self, listener: CallListener) -> None:
        """Add a listener for the calls that are planned from now on."""
        with self._lock:
            self._set((*self.all, listener))

    def remove(self, listener: CallListener) -> bool:
        """Remove a listener from further calls; return whether it was there."""
        with self._lock:
            there = listener in self.all
            self._set(tuple(one for one in self.all if one is not listener))
            return there

    def _set(self, listeners: tuple[CallListener, ...]) -> None:
        self.all, self.heard = listeners, Heard(listeners)

    def drop(self, hook: Callable[..., None], error: Exception) -> None:
        """Remove the listener that raised, and report it; once."""
        listener: Any = getattr(hook, "__self__", None)
        if self.remove(listener):  # else a call that was planned before has reported it already
            _log.warning(
                "%s raised %s: %s, and hears of no further calls",
                type(listener).__name__,
                type(error).__name__,
                error,
                exc_info=error,
            )


#: Listeners of the calls of all groups of this process.
everywhere = Listeners()
