"""Names of dispatch modes: how arguments reach ranks and results return.

A mode is only a value here: ``phalanx.dispatch`` implements it, and looks it up by its kind. So a declaration can be
checked, pickled and compared without importing anything that moves data.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from phalanx.errors import DeclarationError

#: How outputs become what a call gives: their rows joined, the list of them, the first of them, nothing (no output is
#: brought to the caller), or what a function of (group, outputs) makes of them.
Collect: TypeAlias = Literal["join", "list", "first", "none"] | Callable[..., Any]
COLLECTS = ("join", "list", "first", "none")
Kind: TypeAlias = Literal["same", "lists", "rows", "rank zero", "custom"]


#: For type checkers, how outputs are collected: a list, a value of the method's own type, or that of a single rank.
Listed: TypeAlias = Literal["list"]
Whole: TypeAlias = Literal["join"]
Single: TypeAlias = Literal["first"]
K = TypeVar("K")


@dataclass(frozen=True)
class DispatchMode(Generic[K]):
    """A dispatch mode: how arguments reach the ranks, and how outputs are returned.

    ``K``, which only type checkers look at, is ``collect`` as a literal type: ``Listed``, ``Whole`` or ``Single``.
    Equivalent modes are equal whatever their names.

    Attributes:
        kind: "same": the same to every rank; "lists": each argument is a list with an element per rank; "rows": rows
            are split over the ranks; "rank zero": the arguments as they are, to rank 0; "custom": by a function of the
            user.
        collect: how outputs become the value of a call.
        name: the name in ``px.Dispatch`` by which the mode was requested.
        mesh: name of the mesh over whose dp coordinates, in place of the ranks, lists and rows are split. Ranks along
            the other axes get the same piece.
        pp_as_dp: the pp axis counts as part of dp.
        balance: key (or function of the call's arguments) whose value per row is evened out over dp.
        group_size: number of consecutive rows that stay together.
        leader_only: only the first rank of each dp coordinate gets the piece, and its peers get ``None``.
        dispatch_fn: ``dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`` of a custom mode. It returns, for every
            argument, a list with an element per rank. ``collect`` is then a function of (group, outputs by rank).
    """

    kind: Kind
    collect: Collect
    name: str = field(compare=False)
    mesh: str | None = None
    pp_as_dp: bool = False
    balance: str | Callable[..., Any] | None = None
    group_size: int = 1
    leader_only: bool = False
    dispatch_fn: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"custom mode {self.name}" if self.kind == "custom" else f"Dispatch.{self.name}"


def custom_mode(
    dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any], name: str = "CUSTOM"
) -> DispatchMode[Any]:
    """Return the mode of a user's pair of functions."""
    return DispatchMode("custom", collect_fn, name, dispatch_fn=dispatch_fn)


class Scheme(Protocol):
    """An object that is a custom mode: its methods are the two functions."""

    @property
    def dispatch(self) -> Callable[..., Any]: ...

    @property
    def collect(self) -> Callable[..., Any]: ...


Mode: TypeAlias = DispatchMode[Any]


class _DispatchNames(type):
    """Makes ``Dispatch`` behave as an enum that users can extend: its modes are attributes of the class."""

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
    """How arguments reach ranks and results return.

    Five modes: ``ONE_TO_ALL``, ``ALL_TO_ALL``, ``ROWS``, ``mesh(...)`` and ``RANK_ZERO``. The others are verl's names,
    and equal to them: ``DP_COMPUTE`` is ``ALL_TO_ALL``; ``DP_COMPUTE_PROTO`` and ``DP_COMPUTE_PROTO_WITH_FUNC`` are
    ``ROWS``, and ``DP_COMPUTE_METRIC`` is ``ROWS`` with ``collect="list"``; ``MEGATRON_COMPUTE_PROTO`` is ``mesh()``
    and ``MEGATRON_PP_AS_DP_PROTO`` is ``mesh(pp_as_dp=True)``. New names are added by
    :func:`phalanx.data.register_dispatch_mode`.
    """

    ONE_TO_ALL: DispatchMode[Listed] = DispatchMode("same", "list", "ONE_TO_ALL")
    ALL_TO_ALL: DispatchMode[Listed] = DispatchMode("lists", "list", "ALL_TO_ALL")
    ROWS: DispatchMode[Whole] = DispatchMode("rows", "join", "ROWS")
    RANK_ZERO: DispatchMode[Single] = DispatchMode("rank zero", "first", "RANK_ZERO")
    DP_COMPUTE: DispatchMode[Listed] = DispatchMode("lists", "list", "DP_COMPUTE")
    DP_COMPUTE_PROTO: DispatchMode[Whole] = DispatchMode("rows", "join", "DP_COMPUTE_PROTO")
    DP_COMPUTE_METRIC: DispatchMode[Listed] = DispatchMode("rows", "list", "DP_COMPUTE_METRIC")
    DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode[Whole] = DispatchMode(
        "rows", "join", "DP_COMPUTE_PROTO_WITH_FUNC"
    )
    MEGATRON_COMPUTE: DispatchMode[Listed] = DispatchMode("lists", "list", "MEGATRON_COMPUTE", "default")
    MEGATRON_COMPUTE_PROTO: DispatchMode[Whole] = DispatchMode(
        "rows", "join", "MEGATRON_COMPUTE_PROTO", "default"
    )
    MEGATRON_PP_AS_DP: DispatchMode[Listed] = DispatchMode(
        "lists", "list", "MEGATRON_PP_AS_DP", "default", pp_as_dp=True
    )
    MEGATRON_PP_AS_DP_PROTO: DispatchMode[Whole] = DispatchMode(
        "rows", "join", "MEGATRON_PP_AS_DP_PROTO", "default", pp_as_dp=True
    )

    @staticmethod
    def mesh(
        name: str = "default",
        *,
        pp_as_dp: bool = False,
        balance: str | Callable[..., Any] | None = None,
        group_size: int = 1,
        leader_only: bool = False,
    ) -> DispatchMode[Whole]:
        """Split rows over the dp axis of the group's mesh ``name``; the same piece to all tp, pp and cp peers.

        Args:
            name: of the mesh.
            pp_as_dp: count pp as part of dp: each pp stage gets rows of its own.
            balance: even out over dp the sum of this column, or of this function of the arguments (a value per row).
            group_size: keep that many consecutive rows together.
            leader_only: send the rows to the first rank of each dp coordinate, and ``None`` to its peers.

        Raises:
            DeclarationError: ``group_size`` is no whole number from 1, or ``name`` is no text.
        """
        if isinstance(group_size, bool) or not isinstance(group_size, Integral) or group_size < 1:
            raise DeclarationError(
                f"Dispatch.mesh(group_size={group_size!r}): expected a whole number from 1"
            )
        if not isinstance(name, str):
            raise DeclarationError(f"Dispatch.mesh({name!r}): expected the name of a mesh as text")
        title = f"mesh({name!r})"
        return DispatchMode("rows", "join", title, name, pp_as_dp, balance, group_size, leader_only)


class Execute(enum.Enum):
    """Which ranks run a method."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


def register_dispatch_mode(
    name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode[Any]:
    """Add a mode, available as ``px.Dispatch.<name>`` afterwards.

    Args:
        name: an identifier that no mode has yet, such as ``"TWO_TO_ALL"``.
        dispatch_fn: ``dispatch_fn(group, *args, **kwargs) -> (args, kwargs)``, each argument a list with an element per
            rank. It gets shallow copies of the caller's lists and dicts.
        collect_fn: ``collect_fn(group, outputs)``, outputs by rank; the call returns its value.

    Raises:
        DeclarationError: the name is taken or no identifier, or a function is not callable.
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
    """Return the mode for ``given``: a mode, or a ``{"dispatch_fn": f, "collect_fn": g}`` pair.

    Raises:
        DeclarationError: it is neither; the message lists the known modes.
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
    """Return the same mode with another way to collect outputs.

    Args:
        mode: a mode of ``px.Dispatch``; a custom mode has a collect function of its own.
        collect: an element of ``COLLECTS``, or a function of (group, outputs).
        one_rank: whether a single rank runs the method, whatever the mode.

    Raises:
        DeclarationError: ``collect`` is unknown, or does not fit the mode.
    """
    if not callable(collect) and collect not in COLLECTS:
        expected = ", ".join(map(repr, COLLECTS))
        raise DeclarationError(
            f"px.register: collect={collect!r}; expected one of {expected}, or a function of (group, outputs)"
        )
    if mode.kind == "custom":
        raise DeclarationError(
            f"px.register: collect={_named(collect)} beside the custom mode {mode.name}, which has a collect function "
            f"of its own ({_named(mode.collect)}); give one of the two"
        )
    if (one_rank or mode.kind == "rank zero") and collect not in ("first", "none"):
        raise DeclarationError(
            f"px.register: collect={_named(collect)} where only rank 0 runs the method: its output is the value "
            'already; leave collect= out, or give "none" where nothing is wanted'
        )
    return replace(mode, collect=collect)


def _named(collect: Collect) -> str:
    return repr(collect) if isinstance(collect, str) else getattr(collect, "__name__", repr(collect))
