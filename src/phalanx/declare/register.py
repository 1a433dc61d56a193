"""``@px.register``: how a worker method is called through a group; its specification, and its types for type checkers.

``@px.register`` does not change the function. Only for type checkers, its first parameter becomes
``Self | Returns[...]``: the method can be called and overridden as before, and ``group.method(Accumulator.add)`` reads
the result types from this parameter.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

from phalanx.declare.dispatch_modes import (
    Collect,
    Dispatch,
    DispatchMode,
    Execute,
    Listed,
    Mode,
    Scheme,
    Single,
    Whole,
    as_mode,
    collecting,
)
from phalanx.errors import DeclarationError
from phalanx.wire.value import checked_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
One = TypeVar("One")
T = TypeVar("T")
Item = TypeVar("Item")
Alone = TypeVar("Alone")
MARK = "__phalanx_spec__"
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class MethodSpec:
    """Name, dispatch mode and options of a worker method; see ``px.register``.

    ``title`` is displayed in place of the name, for functions of the library. ``streams`` is True for a generator,
    whose items a caller can stream. ``signature`` is without ``self``; None: unknown.
    """

    name: str
    mode: Mode = Dispatch.ONE_TO_ALL
    execute: Execute = Execute.ALL
    blocking: bool = True
    readonly: bool = False
    rerun_on_restart: bool = False
    replicated: bool = False
    pad_to_multiple: int | None = None
    to_device: bool = False
    is_async: bool = False
    needs_weights: bool = True
    title: str = ""
    streams: bool = False
    signature: inspect.Signature | None = field(default=None, compare=False)
    doc: str | None = field(default=None, compare=False)

    @cached_property
    def positional_names(self) -> tuple[str, ...]:
        """Names of the parameters that accept a positional argument."""
        known = self.signature.parameters if self.signature else {}
        return tuple(name for name, parameter in known.items() if parameter.kind in POSITIONAL)

    @cached_property
    def positional_counts(self) -> range:
        """Valid numbers of arguments if all are positional; empty if keywords are required or it is unknown."""
        if self.signature is None:
            return range(0)
        known = self.signature.parameters.values()
        needed = [p for p in known if p.default is p.empty and p.kind not in _VARIADIC]
        if any(p.kind not in POSITIONAL for p in needed):
            return range(0)
        return range(len(needed), len(self.positional_names) + 1)


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


class _AnyOptions(TypedDict, total=False):
    readonly: bool
    to_device: bool
    rerun_on_restart: bool
    replicated: bool
    needs_weights: bool
    pad_to_multiple: int | None


class _Options(_AnyOptions, total=False):
    execute_mode: Literal[Execute.ALL]
    blocking: Literal[True]


# Overloads for type checkers: collect= determines the type of a result, else the mode does. Other results are Any.
@overload
def register(method: AsyncMethod[S, P, R], /) -> RegisteredAsync[S, list[R], R, P, R]: ...
@overload
def register(method: Yielding[S, P, T], /) -> Streaming[S, list[list[T]], T, tuple[int, T], P]: ...
@overload
def register(method: AsyncYielding[S, P, T], /) -> AsyncStreaming[S, list[list[T]], T, tuple[int, T], P]: ...
@overload
def register(method: Method[S, P, R], /) -> Registered[S, list[R], R, P, R]: ...
@overload
def register(
    dispatch_mode: object = ...,
    *,
    execute_mode: Literal[Execute.RANK_ZERO],
    blocking: Literal[True] = ...,
    **options: Unpack[_AnyOptions],
) -> GivingOne: ...
@overload
def register(
    dispatch_mode: object = ..., *, collect: Literal["list"], **options: Unpack[_Options]
) -> Listing: ...
@overload
def register(
    dispatch_mode: object = ..., *, collect: Literal["first"], **options: Unpack[_Options]
) -> GivingOne: ...
@overload
def register(
    dispatch_mode: object = ..., *, collect: Literal["join"], **options: Unpack[_Options]
) -> Giving: ...
@overload
def register(dispatch_mode: DispatchMode[Listed] = ..., **options: Unpack[_Options]) -> Listing: ...
@overload
def register(dispatch_mode: DispatchMode[Single], **options: Unpack[_Options]) -> GivingOne: ...
@overload
def register(dispatch_mode: DispatchMode[Whole], **options: Unpack[_Options]) -> Giving: ...
@overload
def register(
    dispatch_mode: Mode | Mapping[str, Callable[..., Any]] | Scheme = ...,
    execute_mode: Execute = ...,
    blocking: bool = ...,
    *,
    collect: Collect | None = ...,
    **options: Unpack[_AnyOptions],
) -> Callable[[F], F]: ...
def register(
    dispatch_mode: Any = Dispatch.ONE_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    *,
    collect: Collect | None = None,
    readonly: bool = False,
    to_device: bool = False,
    rerun_on_restart: bool = False,
    replicated: bool = False,
    needs_weights: bool = True,
    pad_to_multiple: int | None = None,
) -> Any:
    """Make a worker method callable through the group, as ``group.<method>(...)``.

    Args:
        dispatch_mode: how arguments reach ranks, and how outputs become the result: ``px.Dispatch.*``, a
            ``{"dispatch_fn", "collect_fn"}`` dict, or an object with methods ``dispatch`` and ``collect``. Default:
            ``ONE_TO_ALL``.
        execute_mode: ``px.Execute.ALL``, or ``RANK_ZERO``: only rank 0 runs the method, and its value is the result.
        blocking: True if a bare call waits; False if it returns a ``CallFuture``.
        collect: how outputs become the result, in place of the mode's own way: ``"join"``: their rows are joined,
            ``"list"``: a list by rank or dp coordinate, ``"first"``: the output of the first rank or dp coordinate,
            ``"none"``: None, and no output leaves its rank; or a function of ``(group, outputs)``. A call on a single
            rank returns the rank's output in any case, except for ``"none"``.
        readonly: True if arguments arrive without a copy, as read-only views of shared memory.
        to_device: True if tensors among the arguments arrive on the worker's device.
        rerun_on_restart: True if ``group.restart()`` repeats the call, with the same arguments, in the new processes.
            Only calls of the process that owns the group are repeated, not those of handles in other processes.
        replicated: True if every rank has to return an equal value, which debug mode checks.
        needs_weights: False if the method may run while the accepted weights of its role mix versions, after a sync
            failed; other methods raise ``WeightsTorn`` then.
        pad_to_multiple: pad each rank's rows up to a multiple of this number, by repeating them. Padding is removed
            from outputs that have a row for each row. In a column of ids, an id that comes twice is padding.

    Raises:
        DeclarationError: if the mode is unknown, ``collect`` or padding does not fit the mode, or the decorated object
            is not a plain method.
    """
    if inspect.isfunction(dispatch_mode):  # used bare: @px.register
        return register()(dispatch_mode)
    if isinstance(dispatch_mode, _NO_METHODS) or hasattr(dispatch_mode, "__wrapped__"):
        raise _no_method(dispatch_mode)
    mode = _mode(dispatch_mode, execute_mode, collect)
    pad_to_multiple = _checked_padding(mode, pad_to_multiple)
    partial = MethodSpec(
        name="",
        mode=mode,
        execute=execute_mode,
        blocking=blocking,
        readonly=readonly,
        to_device=to_device,
        rerun_on_restart=rerun_on_restart,
        replicated=replicated,
        needs_weights=needs_weights,
        pad_to_multiple=pad_to_multiple,
    )

    def mark(function: F) -> F:
        if not inspect.isfunction(function) or _makes_context_manager(function):
            raise _no_method(function)
        setattr(function, MARK, partial)
        return cast(F, function)

    return mark


def _mode(dispatch_mode: Any, execute_mode: Any, collect: Collect | None) -> Mode:
    mode = as_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise DeclarationError(
            f"px.register: unknown execute mode {execute_mode!r}; expected px.Execute.ALL or RANK_ZERO"
        )
    if collect is None:
        return mode
    return collecting(mode, collect, one_rank=execute_mode is Execute.RANK_ZERO)


def _checked_padding(mode: Mode, multiple: Any) -> int | None:
    if multiple is None:
        return None
    number = checked_number("px.register: pad_to_multiple", multiple, 1)
    if mode.kind != "rows":
        raise DeclarationError(f"px.register: {mode!r} splits no rows; leave pad_to_multiple= out")
    return number


#: Types of objects, other than functions, that decorators of the standard library return.
_NO_METHODS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
)


def _no_method(given: Any) -> DeclarationError:
    kind = "contextmanager" if inspect.isfunction(given) else type(given).__name__.strip("_")
    kind = "cache" if "lru_cache" in kind else kind
    inner = (
        getattr(given, "__wrapped__", None) or getattr(given, "func", None) or getattr(given, "fget", None)
    )
    name = getattr(inner or given, "__qualname__", repr(given))
    return DeclarationError(
        f"px.register on {name}, which is a {kind}: expected a plain method (def or async def with self), since it is "
        f"called on each rank's instance and its output is sent back; leave {kind} out, or call what it makes from a "
        "plain method that is registered"
    )


def _makes_context_manager(function: Any) -> bool:
    """Return whether a function was decorated with contextlib.contextmanager or asynccontextmanager."""
    return function.__code__.co_name == "helper" and function.__globals__ is vars(contextlib)
