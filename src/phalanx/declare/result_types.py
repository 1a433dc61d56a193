"""Types of the results of registered methods, for type checkers.

``@px.register`` does not change the function. Only for type checkers, its first parameter becomes
``Self | Returns[...]``: the method can be called and overridden as before, and ``group.method(Accumulator.add)`` reads
the result types from this parameter.
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
    """Result types of a method: ``V`` of a call on all ranks, ``One`` on a single rank, as by ``group[0]``."""

    #: Makes both parameters invariant, so that a type checker infers exactly these types.
    exactly: Callable[[V, One], tuple[V, One]]


class Yields(Generic[V, One, Item, Alone]):
    """Result types of a method that yields: of a bare call on all ranks and on a single rank, and of stream items."""

    exactly: Callable[[V, One, Item, Alone], tuple[V, One, Item, Alone]]


#: A plain method, and a coroutine method.
Method: TypeAlias = Callable[Concatenate[S, P], R]
AsyncMethod: TypeAlias = Callable[Concatenate[S, P], Coroutine[Any, Any, R]]
#: Types of registered methods. (``object`` in place of Any: with Any in an argument, overloads are ambiguous to mypy.)
Registered: TypeAlias = Callable[Concatenate[S | Returns[V, One], P], R]
RegisteredAsync: TypeAlias = Callable[Concatenate[S | Returns[V, One], P], Coroutine[object, None, R]]
#: Types of generators, before and after registration.
Yielding: TypeAlias = Callable[Concatenate[S, P], Iterator[T]]
AsyncYielding: TypeAlias = Callable[Concatenate[S, P], AsyncIterator[T]]
Streaming: TypeAlias = Callable[Concatenate[S | Yields[V, list[T], Item, T], P], Iterator[T]]
AsyncStreaming: TypeAlias = Callable[Concatenate[S | Yields[V, list[T], Item, T], P], AsyncIterator[T]]


class Listing(Protocol):
    """Decorator of a method whose calls return a list."""

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
    """Decorator of a method whose calls return a value of the method's own type."""

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
    """Decorator of a method whose calls return the value of a single rank."""

    @overload
    def __call__(self, method: AsyncMethod[S, P, R], /) -> RegisteredAsync[S, R, R, P, R]: ...
    @overload
    def __call__(self, method: Yielding[S, P, T], /) -> Streaming[S, list[T], T, T, P]: ...
    @overload
    def __call__(self, method: AsyncYielding[S, P, T], /) -> AsyncStreaming[S, list[T], T, T, P]: ...
    @overload
    def __call__(self, method: Method[S, P, R], /) -> Registered[S, R, R, P, R]: ...
