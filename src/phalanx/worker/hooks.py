"""Hooks around the calls of a rank, such as a profiler.

A rank without hooks pays one look at an empty dict per call.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Protocol

from phalanx.errors import DeclarationError
from phalanx.wire.messages import RUN
from phalanx.wire.method_names import full_name

End = Callable[[BaseException | None], None]


@dataclass(frozen=True)
class Seen:
    """A call that is about to run."""

    role: str
    method: str

    @property
    def name(self) -> str:
        """The call as users name it: ``actor.update``, ``update``, ``run``."""
        method = "run" if self.method == RUN else self.method
        return full_name(self.role, method)


class Hook(Protocol):
    """Something to be done around calls."""

    def begin(self, seen: Seen) -> End | None:
        """Before a call; what to do when it has ended (None: nothing). Must not raise."""
        ...

    def finish(self) -> Any:
        """Give what was gathered; no call follows."""
        ...


@dataclass(frozen=True)
class Wanted:
    """Which calls a hook is for: of any method, or of those named, with or without their role."""

    role: str = ""
    methods: tuple[str, ...] | None = None

    def fits(self, seen: Seen) -> bool:
        """Whether the call is one of them."""
        if self.role and seen.role != self.role:
            return False
        if self.methods is None:
            return True
        return seen.name in self.methods or seen.name.rpartition(".")[2] in self.methods


class Hooks:
    """The hooks of one rank, by the key under which they were asked for."""

    def __init__(self) -> None:
        self._armed: dict[str, Hook] = {}

    def __bool__(self) -> bool:
        return bool(self._armed)

    def add(self, key: str, hook: Hook) -> None:
        """From the next call on."""
        self._armed[key] = hook

    def take(self, key: str) -> Hook:
        """Take one away.

        Raises:
            DeclarationError: there is none of that key; the rank was started anew since.
        """
        try:
            return self._armed.pop(key)
        except KeyError:
            raise DeclarationError(
                "this rank was started anew since, and has forgotten what it had gathered"
            ) from None

    def around(
        self, seen: Seen, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method with the hooks around it.

        Of an ``async`` one, or one that yields, what is to be awaited or iterated over in its place.
        """
        ends = [end for hook in tuple(self._armed.values()) if (end := hook.begin(seen)) is not None]
        if not ends:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            _end(ends, error)
            raise
        if isinstance(result, Awaitable):
            return _awaited(result, ends)
        if isinstance(result, GeneratorType):
            return _yielding(result, ends)
        if isinstance(result, AsyncGeneratorType):
            return _yielding_async(result, ends)
        _end(ends, None)
        return result


def _end(ends: Sequence[End], error: BaseException | None) -> None:
    for end in reversed(ends):
        end(error)


async def _awaited(result: Awaitable[Any], ends: Sequence[End]) -> Any:
    try:
        value = await result
    except BaseException as error:
        _end(ends, error)
        raise
    _end(ends, None)
    return value


def _yielding(items: Generator[Any], ends: Sequence[End]) -> Generator[Any]:
    try:
        yield from items
    except BaseException as error:
        _end(ends, error)
        raise
    _end(ends, None)


async def _yielding_async(items: AsyncGenerator[Any], ends: Sequence[End]) -> AsyncGenerator[Any]:
    try:
        async with aclosing(items):
            async for item in items:
                yield item
    except BaseException as error:
        _end(ends, error)
        raise
    _end(ends, None)


class Only:
    """At most one of a kind in this process, as for profilers, whichever rank of it asks."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._lock = threading.Lock()
        self._holder: str | None = None

    def take(self, key: str) -> None:
        """Raises DeclarationError where somebody else has it."""
        with self._lock:
            if self._holder not in (None, key):
                raise DeclarationError(self._message)
            self._holder = key

    def give_back(self, key: str) -> None:
        """Idempotent."""
        with self._lock:
            if self._holder == key:
                self._holder = None
