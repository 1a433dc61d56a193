"""An error that is a `RemoteCallError` and also an instance of the worker's exception type.

The type is made at run time from both. Its instance gets the arguments and attributes of the remote exception without
running any code of its class; text, pickling and identity are those of phalanx. If any of this fails, the error is a
plain `RemoteCallError` with the same text.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from phalanx.errors import (
    ChannelError,
    CheckpointError,
    PhalanxError,
    RankReport,
    RemoteCallError,
    StalenessTimeout,
    WeightsError,
)
from phalanx.wire.exceptions import Parts, assemble, load_parts
from phalanx.wire.failure import RankFailure

# On the driver these would end its own loops and generators in silence, not report a failure.
_NEVER = (StopIteration, StopAsyncIteration, RankFailure)
# Of phalanx's own errors those that say the same to whoever called: weights, channels, leases and saves are shared
# with ranks.
_SHARED = (WeightsError, ChannelError, StalenessTimeout, CheckpointError)


def remote_error_type(
    base: type[BaseException], plain: type[RemoteCallError] = RemoteCallError
) -> type[RemoteCallError]:
    """Return the type that derives from `plain` and from `base`, or `plain` itself.

    `plain` is returned if `base` is no `Exception` (KeyboardInterrupt, SystemExit, asyncio.CancelledError), for
    StopIteration and its like, and for phalanx's own errors: a `GroupClosed` of some other group, met inside a worker,
    says nothing about the group that was called. Errors about state that driver and ranks share (weights, channels,
    leases, saves) keep their type. Of an error that came from a further group, the remote type in it counts. The same
    arguments return the same type.
    """
    base = getattr(base, "_phalanx_base", base)
    if (
        not issubclass(base, Exception)
        or issubclass(base, _NEVER)
        or (issubclass(base, PhalanxError) and not issubclass(base, _SHARED))
        or issubclass(plain, base)
    ):
        return plain
    return _dual_type(base, plain)


def remote_error(
    plain: type[RemoteCallError], message: str, *, group: str, method: str, failures: tuple[RankReport, ...]
) -> RemoteCallError:
    """An error of type `plain`, where possible also of the type that the first of the causes raised."""
    error = plain(message, group=group, method=method, failures=failures)
    parts = _remote_parts(error)
    if parts is None:
        return error
    cls = remote_error_type(parts.cls, plain)
    if cls is plain:
        return error
    try:
        return _checked(_dual(cls, parts, error))
    except Exception:
        # The class reads or refuses something that we cannot know: the text says all that the type would.
        return error


def _remote_parts(error: RemoteCallError) -> Parts | None:
    """Return the exception of the first cause; errors of further groups are followed to their original exception."""
    raised = [report for report in error.causes if report.kind == "raised"]
    if not raised:
        return None
    parts = load_parts(raised[0].exception_bytes)
    if parts is not None and isinstance(parts.whole, RemoteCallError):
        return _remote_parts(parts.whole)
    return parts


@functools.lru_cache(maxsize=512)
def _dual_type(base: type[Exception], plain: type[RemoteCallError]) -> type[RemoteCallError]:
    name = f"{plain.__name__}[{base.__name__}]"
    # Frozen dataclasses refuse attributes, others are unhashable or compare by value: all of that is undone.
    members: dict[str, Any] = {
        "__doc__": f"A {plain.__name__} that is also the {base.__qualname__} which a worker raised.",
        "__module__": plain.__module__,
        "__qualname__": name,
        "_phalanx_base": base,
        "__setattr__": object.__setattr__,
        "__delattr__": object.__delattr__,
        "__eq__": object.__eq__,
        "__ne__": object.__ne__,
        "__hash__": object.__hash__,
        "__bool__": lambda self: True,
        "__reduce__": _reduce,
        "__reduce_ex__": lambda self, protocol: _reduce(self),
    }
    try:
        made = types.new_class(name, (plain, base), exec_body=lambda space: space.update(members))
    except Exception:
        # Layouts or metaclasses that do not go together, or a class that forbids subclasses.
        return plain
    return made if issubclass(made, plain) and issubclass(made, base) else plain


def _dual(cls: type[RemoteCallError], parts: Parts, error: RemoteCallError) -> RemoteCallError:
    dual = assemble(cls, parts)
    if parts.whole is not None:  # an error of phalanx, with its fields next to its text
        dual.__dict__.update(parts.whole.__dict__)
    dual.__dict__.update(error.__dict__)
    if isinstance(dual, SyntaxError):
        # Python prints the fields of a SyntaxError in place of its text.
        notes: Any = dual.__dict__.get("__notes__", ())
        dual.__dict__["__notes__"] = [*notes, str(error)]
    if not isinstance(dual, RemoteCallError):
        raise TypeError(f"{cls.__name__} did not give an instance of itself")
    return dual


def _checked(dual: RemoteCallError) -> RemoteCallError:
    """Use it as a driver would; any error of the class's own code shows here and not there."""
    for use in (repr, str, hash, bool, lambda error: error.with_traceback(None)):
        use(dual)
    if str(dual) != dual.__dict__["_phalanx_text"] or not isinstance(dual.args, tuple):
        raise TypeError(f"{type(dual).__name__} hides what an error of phalanx says")
    return dual


def _reduce(dual: RemoteCallError) -> tuple[Callable[..., RemoteCallError], tuple[Any, ...]]:
    plain = next(
        c for c in type(dual).__mro__ if "_phalanx_base" not in vars(c) and issubclass(c, RemoteCallError)
    )
    notes = dual.__dict__.get("__notes__", ())
    return _restore, (plain, str(dual), dual.group, dual.method, dual.failures, tuple(notes))


def _restore(
    plain: type[RemoteCallError],
    message: str,
    group: str,
    method: str,
    failures: tuple[RankReport, ...],
    notes: tuple[str, ...],
) -> RemoteCallError:
    error = remote_error(plain, message, group=group, method=method, failures=failures)
    if notes:
        error.__dict__["__notes__"] = list(notes)
    return error
