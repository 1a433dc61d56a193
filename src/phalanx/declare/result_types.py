"""Types of the results of registered methods, for type checkers.

``@px.register`` leaves the function as it is. For type checkers alone, its first parameter is then
``Self | Returns[...]``: the method is called and overridden as before, and ``group.method(Accumulator.add)`` reads
the types from there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
One = TypeVar("One")
T = TypeVar("T")
Item = TypeVar("Item")
Alone = TypeVar("Alone")


class Returns(Generic[V, One]):
    """A bare call waits: it returns ``V``, or ``One`` if it goes to a single rank (``group[0]``, ``group.any``)."""

    #: Says that both are invariant, so that a checker finds exactly these.
    exactly: Callable[[V, One], tuple[V, One]]


class Yields(Generic[V, One, Item, Alone]):
    """A method that yields: results of a bare call to all ranks and to a single rank, and the items of both streams."""

    exactly: Callable[[V, One, Item, Alone], tuple[V, One, Item, Alone]]


#: A method that a caller waits for as for a function, and the coroutine function of which the worker runs each call.
Method: TypeAlias = Callable[Concatenate[S, P], R]
AsyncMethod: TypeAlias = Callable[Concatenate[S, P], Coroutine[Any, Any, R]]
#: Its type once registered. (``object`` in place of Any: mypy takes an Any in an argument for doubt about overloads.)
Registered: TypeAlias = Callable[Concatenate[S | Returns[V, One], P], R]
RegisteredAsync: TypeAlias = Callable[Concatenate[S | Returns[V, One], P], Coroutine[object, None, R]]
#: Generators, before and after.
Yielding: TypeAlias = Callable[Concatenate[S, P], Iterator[T]]
AsyncYielding: TypeAlias = Callable[Concatenate[S, P], AsyncIterator[T]]
Streaming: TypeAlias = Callable[Concatenate[S | Yields[V, list[T], Item, T], P], Iterator[T]]
AsyncStreaming: TypeAlias = Callable[Concatenate[S | Yields[V, list[T], Item, T], P], AsyncIterator[T]]


class Listing(Protocol):
    """Registers a method whose calls return a list."""

    @overload
    def __call__(self, method: AsyncMethod[S, P, R], /) -> RegisteredAsync[S, list[R], R, P, R]: ...
    @overload
    def __call__(self, method: Yielding[S, P, T], /) -> Streaming[S, list[list[T]], T, tuple[int, T], P]: ...
    @overload
    def __call__(
        self, method: AsyncYielding[S, P, T], /
    ) -> AsyncStreaming[S, list[list[T]], T, tuple[int, T], P]: ...
    @overload
    def __call__(self, method: Method[S, P, R], /) -> Registered[S, list[R], R, P, R]: ...


class Giving(Protocol):
    """Registers a method whose calls return a value of its own type."""

    @overload
    def __call__(self, method: AsyncMethod[S, P, R], /) -> RegisteredAsync[S, R, R, P, R]: ...
    @overload
    def __call__(self, method: Yielding[S, P, T], /) -> Streaming[S, list[T], T, tuple[int, T], P]: ...
    @overload
    def __call__(
        self, method: AsyncYielding[S, P, T], /
    ) -> AsyncStreaming[S, list[T], T, tuple[int, T], P]: ...
    @overload
    def __call__(self, method: Method[S, P, R], /) -> Registered[S, R, R, P, R]: ...


class GivingOne(Protocol):
    """Registers a method whose calls return the value of a single rank."""

    @overload
    def __call__(self, method: AsyncMethod[S, P, R], /) -> RegisteredAsync[S, R, R, P, R]: ...
    @overload
    def __call__(self, method: Yielding[S, P, T], /) -> Streaming[S, list[T], T, T, P]: ...
    @overload
    def __call__(self, method: AsyncYielding[S, P, T], /) -> AsyncStreaming[S, list[T], T, T, P]: ...
    @overload
    def __call__(self, method: Method[S, P, R], /) -> Registered[S, R, R, P, R]: ...
