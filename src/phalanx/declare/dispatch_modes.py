"""Dispatch modes: how arguments reach ranks, and how outputs become the result.

A mode is only a value here; ``phalanx.dispatch`` implements the modes by their kind. So declarations can be checked,
pickled and compared without importing the code that moves data.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from phalanx.errors import DeclarationError
from phalanx.wire.value import checked_number

#: How outputs become the result of a call: joined rows, list of outputs, first output, None (no output is sent to the
#: caller), or the return value of a function of (group, outputs).
Collect: TypeAlias = Literal["join", "list", "first", "none"] | Callable[..., Any]
COLLECTS = ("join", "list", "first", "none")
Kind: TypeAlias = Literal["same", "lists", "rows", "rank zero", "custom"]


#: For type checkers, the result of a call: a list, a value of the method's own type, or the value of a single rank.
Listed: TypeAlias = Literal["list"]
Whole: TypeAlias = Literal["join"]
Single: TypeAlias = Literal["first"]
K = TypeVar("K")


@dataclass(frozen=True)
class DispatchMode(Generic[K]):
    """A dispatch mode: how arguments reach the ranks, and how outputs are returned.

    ``K`` is ``collect`` as a literal type, for type checkers: ``Listed``, ``Whole`` or ``Single``. Modes that differ
    only in their names are equal.

    Attributes:
        kind: "same": every rank gets the same arguments; "lists": each argument is a list with an element per rank;
            "rows": rows are split over the ranks; "rank zero": rank 0 gets the unchanged arguments; "custom": a
            function of the user splits the arguments.
        collect: how outputs become the result of a call.
        name: name of the mode in ``px.Dispatch``.
        mesh: name of the mesh over whose dp coordinates lists and rows are split; None: over the ranks. Ranks along the
            other axes get the same shard.
        pp_as_dp: True if the pp axis counts as part of dp.
        balance: name of a value per row, or function that returns it, whose sum is balanced over dp; see
            :meth:`Dispatch.mesh`.
        group_size: number of consecutive rows that stay together.
        dispatch_fn: ``dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`` of a custom mode. It returns a list with
            an element per rank for every argument. ``collect`` is then a function of (group, outputs by rank).
    """

    kind: Kind
    collect: Collect
    name: str = field(compare=False)
    mesh: str | None = None
    pp_as_dp: bool = False
    balance: str | Callable[..., Any] | None = None
    group_size: int = 1
    dispatch_fn: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"custom mode {self.name}" if self.kind == "custom" else f"Dispatch.{self.name}"


def custom_mode(
    dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any], name: str = "CUSTOM"
) -> DispatchMode[Any]:
    """Return the dispatch mode of a user's pair of functions."""
    return DispatchMode("custom", collect_fn, name, dispatch_fn=dispatch_fn)


class Scheme(Protocol):
    """A custom mode as an object, whose methods are the dispatch and the collect function."""

    @property
    def dispatch(self) -> Callable[..., Any]: ...

    @property
    def collect(self) -> Callable[..., Any]: ...


Mode: TypeAlias = DispatchMode[Any]


class _DispatchNames(type):
    """Metaclass that makes ``Dispatch`` an enum that users can extend. The modes are attributes of the class."""

    def __getattr__(cls, name: str) -> Mode:
        raise AttributeError(f"there is no dispatch mode {name!r}; known: {sorted(cls.names())}")

    def _modes(cls) -> dict[str, Mode]:
        return {name: value for name, value in vars(cls).items() if isinstance(value, DispatchMode)}

    def __iter__(cls) -> Iterator[Mode]:
        return iter(cls._modes().values())

    def __contains__(cls, mode: object) -> bool:
        return mode in cls.names() or mode in list(cls)

    def __getitem__(cls, name: str) -> Mode:
        return cls._modes()[name]

    def names(cls) -> list[str]:
        return list(cls._modes())


class Dispatch(metaclass=_DispatchNames):
    """Dispatch modes: how arguments reach ranks, and how outputs become the result.

    Five modes: ``ONE_TO_ALL``, ``ALL_TO_ALL``, ``ROWS``, ``mesh(...)`` and ``RANK_ZERO``. The other names are verl's,
    for equal modes: ``DP_COMPUTE`` is ``ALL_TO_ALL``; ``DP_COMPUTE_PROTO`` and ``DP_COMPUTE_PROTO_WITH_FUNC`` are
    ``ROWS``, and ``DP_COMPUTE_METRIC`` is ``ROWS`` with ``collect="list"``; ``MEGATRON_COMPUTE_PROTO`` is ``mesh()``
    and ``MEGATRON_PP_AS_DP_PROTO`` is ``mesh(pp_as_dp=True)``. :func:`phalanx.data.register_dispatch_mode` adds names.
    """

    ONE_TO_ALL = DispatchMode[Listed]("same", "list", "ONE_TO_ALL")
    ALL_TO_ALL = DispatchMode[Listed]("lists", "list", "ALL_TO_ALL")
    ROWS = DispatchMode[Whole]("rows", "join", "ROWS")
    RANK_ZERO = DispatchMode[Single]("rank zero", "first", "RANK_ZERO")
    DP_COMPUTE = replace(ALL_TO_ALL, name="DP_COMPUTE")
    DP_COMPUTE_PROTO = replace(ROWS, name="DP_COMPUTE_PROTO")
    DP_COMPUTE_METRIC = DispatchMode[Listed]("rows", "list", "DP_COMPUTE_METRIC")
    DP_COMPUTE_PROTO_WITH_FUNC = replace(ROWS, name="DP_COMPUTE_PROTO_WITH_FUNC")
    MEGATRON_COMPUTE = replace(ALL_TO_ALL, name="MEGATRON_COMPUTE", mesh="default")
    MEGATRON_COMPUTE_PROTO = replace(ROWS, name="MEGATRON_COMPUTE_PROTO", mesh="default")
    MEGATRON_PP_AS_DP = replace(MEGATRON_COMPUTE, name="MEGATRON_PP_AS_DP", pp_as_dp=True)
    MEGATRON_PP_AS_DP_PROTO = replace(MEGATRON_COMPUTE_PROTO, name="MEGATRON_PP_AS_DP_PROTO", pp_as_dp=True)

    @staticmethod
    def mesh(
        name: str = "default",
        *,
        pp_as_dp: bool = False,
        balance: str | Callable[..., Any] | None = None,
        group_size: int = 1,
    ) -> DispatchMode[Whole]:
        """Return a mode that splits rows over the dp axis of a mesh; tp, pp and cp peers get the same shard.

        Args:
            name: name of the group's mesh.
            pp_as_dp: True to count pp as part of dp, so that each pp stage gets its own rows.
            balance: a value per row, whose sum is balanced over dp: the name of an argument, else a key of one (of a
                dict or table), or a function of the arguments that returns the values.
            group_size: number of consecutive rows to keep together.

        Raises:
            DeclarationError: if ``group_size`` is not an integer of at least 1, or ``name`` is not a string.
        """
        group_size = checked_number("Dispatch.mesh: group_size", group_size, 1)
        if not isinstance(name, str):
            raise DeclarationError(f"Dispatch.mesh({name!r}): expected the name of a mesh as text")
        title = f"mesh({name!r})"
        return DispatchMode("rows", "join", title, name, pp_as_dp, balance, group_size)


class Execute(enum.Enum):
    """The ranks that run a method: all, or rank 0 only."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


def register_dispatch_mode(
    name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode[Any]:
    """Add a dispatch mode under the name ``px.Dispatch.<name>``, and return it.

    Args:
        name: an identifier that no mode has yet, such as ``"TWO_TO_ALL"``.
        dispatch_fn: ``dispatch_fn(group, *args, **kwargs) -> (args, kwargs)``, with a list of an element per rank for
            each argument. It gets shallow copies of the caller's lists and dicts.
        collect_fn: ``collect_fn(group, outputs)``, with the outputs by rank; its return value is the result.

    Raises:
        DeclarationError: if the name is taken or not an identifier, or a function is not callable.
    """
    for given, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
        if not callable(function):
            raise DeclarationError(
                f"register_dispatch_mode({name!r}): {given}={function!r}; expected a function"
            )
    if not isinstance(name, str) or not name.isidentifier():
        raise DeclarationError(f"dispatch mode name {name!r}: expected an identifier such as 'TWO_TO_ALL'")
    if hasattr(Dispatch, name):
        raise DeclarationError(f"dispatch mode {name!r} exists already; choose another name")
    mode = custom_mode(dispatch_fn, collect_fn, name)
    setattr(Dispatch, name, mode)
    return mode


def as_mode(given: object) -> Mode:
    """Return the mode for ``given``: a mode, a ``{"dispatch_fn": f, "collect_fn": g}`` dict, or a `Scheme`.

    Raises:
        DeclarationError: if ``given`` is none of these; the message lists the known modes.
    """
    if isinstance(given, DispatchMode):
        return given
    if isinstance(given, dict):
        missing = [key for key in ("dispatch_fn", "collect_fn") if not callable(given.get(key))]
        unknown = sorted(set(given) - {"dispatch_fn", "collect_fn"})
        if missing or unknown:
            raise DeclarationError(
                f"px.register: a custom mode is a dict of two functions, "
                f'{{"dispatch_fn": f, "collect_fn": g}}; missing or not callable: {missing}, unknown: {unknown}'
            )
        return custom_mode(given["dispatch_fn"], given["collect_fn"])
    dispatch_fn, collect_fn = getattr(given, "dispatch", None), getattr(given, "collect", None)
    if callable(dispatch_fn) and callable(collect_fn):  # a scheme object
        return custom_mode(dispatch_fn, collect_fn, type(given).__name__)
    raise DeclarationError(
        f"px.register: unknown dispatch mode {given!r}; expected px.Dispatch.<{' | '.join(Dispatch.names())}>, "
        'px.Dispatch.mesh("name"), a {"dispatch_fn", "collect_fn"} pair, or an object with methods '
        "dispatch(group, *args, **kwargs) and collect(group, outputs)"
    )


def collecting(mode: Mode, collect: Collect, *, one_rank: bool = False) -> Mode:
    """Return a copy of the mode that collects outputs in another way.

    Args:
        mode: a mode of ``px.Dispatch``; custom modes are refused, since they have their own collect function.
        collect: an element of ``COLLECTS``, or a function of (group, outputs).
        one_rank: True if a single rank runs the method, whatever the mode.

    Raises:
        DeclarationError: if ``collect`` is unknown, or does not fit the mode.
    """
    if not callable(collect) and collect not in COLLECTS:
        expected = ", ".join(map(repr, COLLECTS))
        raise DeclarationError(
            f"px.register: collect={collect!r}; expected one of {expected}, or a function of (group, outputs)"
        )
    if mode.kind == "custom":
        raise DeclarationError(
            f"px.register: collect={_named(collect)} together with the custom mode {mode.name}, which has a collect "
            f"function of its own ({_named(mode.collect)}); give one of the two"
        )
    if (one_rank or mode.kind == "rank zero") and collect not in ("first", "none"):
        raise DeclarationError(
            f"px.register: collect={_named(collect)} where only rank 0 runs the method: its output is the value "
            'already; leave collect= out, or give "none" if no result is needed'
        )
    return replace(mode, collect=collect)


def _named(collect: Collect) -> str:
    return repr(collect) if isinstance(collect, str) else getattr(collect, "__name__", repr(collect))
