"""Names of the ways arguments reach ranks and results return.

A mode is only a value here: what it does is in ``phalanx.dispatch``, which looks it up by name. So a
declaration can be checked, pickled and compared without importing anything that moves data.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class DispatchMode:
    """One dispatch mode: a registered name and, for mesh modes, what to split over.

    ``mesh`` names the mesh of the group; ``balance`` is the key (or function of the call's arguments) whose
    value per row is evened out over dp; ``group_size`` keeps that many consecutive rows together;
    ``leader_only`` sends the piece to the first rank of each dp coordinate and ``None`` to its peers.
    """

    name: str
    mesh: str | None = None
    balance: str | Callable[..., Any] | None = None
    group_size: int = 1
    leader_only: bool = False

    def __repr__(self) -> str:
        return f"Dispatch.mesh({self.mesh!r})" if self.name == "MESH" else f"Dispatch.{self.name}"


@dataclass(frozen=True)
class CustomMode:
    """A user's pair of functions.

    ``dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`` gives a list with one element per rank for every
    argument; ``collect_fn(group, outputs)`` turns the outputs by rank into what the call returns.
    """

    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]
    name: str = "CUSTOM"


class _DispatchNames(type):
    """Makes ``Dispatch`` behave as an enum that users can extend."""

    _modes: dict[str, DispatchMode | CustomMode] = {}

    def __getattr__(cls, name: str) -> DispatchMode | CustomMode:
        try:
            return _DispatchNames._modes[name]
        except KeyError:
            raise AttributeError(
                f"there is no dispatch mode {name!r}; known: {sorted(cls.names())}"
            ) from None

    def __iter__(cls) -> Iterator[DispatchMode | CustomMode]:
        return iter(_DispatchNames._modes.values())

    def __contains__(cls, mode: object) -> bool:
        return mode in _DispatchNames._modes or mode in _DispatchNames._modes.values()

    def __getitem__(cls, name: str) -> DispatchMode | CustomMode:
        return _DispatchNames._modes[name]

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *_DispatchNames._modes]

    def names(cls) -> list[str]:
        return list(_DispatchNames._modes)


class Dispatch(metaclass=_DispatchNames):
    """How arguments reach ranks and results return: ``Dispatch.ONE_TO_ALL`` and so on.

    New names are added by :func:`phalanx.register_dispatch_mode`.
    """

    ONE_TO_ALL: DispatchMode
    ALL_TO_ALL: DispatchMode
    RANK_ZERO: DispatchMode
    DP_COMPUTE: DispatchMode
    DP_COMPUTE_PROTO: DispatchMode
    DP_COMPUTE_METRIC: DispatchMode
    DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode
    MEGATRON_COMPUTE: DispatchMode
    MEGATRON_COMPUTE_PROTO: DispatchMode
    MEGATRON_PP_AS_DP: DispatchMode
    MEGATRON_PP_AS_DP_PROTO: DispatchMode
    DIRECT_ROLLOUT_METHOD: DispatchMode

    @staticmethod
    def mesh(
        name: str = "default",
        *,
        balance: str | Callable[..., Any] | None = None,
        group_size: int = 1,
        leader_only: bool = False,
    ) -> DispatchMode:
        """Split rows over the dp axis of the group's mesh ``name``; the same piece to all tp, pp and cp peers."""
        if group_size < 1:
            raise DeclarationError(
                f"Dispatch.mesh(group_size={group_size!r}): expected a whole number from 1"
            )
        return DispatchMode(
            "MESH", mesh=name, balance=balance, group_size=group_size, leader_only=leader_only
        )


_BUILT_IN = (
    "ONE_TO_ALL",
    "ALL_TO_ALL",
    "RANK_ZERO",
    "DP_COMPUTE",
    "DP_COMPUTE_PROTO",
    "DP_COMPUTE_METRIC",
    "DP_COMPUTE_PROTO_WITH_FUNC",
    "DIRECT_ROLLOUT_METHOD",
)
_BUILT_IN_MESH = (
    "MEGATRON_COMPUTE",
    "MEGATRON_COMPUTE_PROTO",
    "MEGATRON_PP_AS_DP",
    "MEGATRON_PP_AS_DP_PROTO",
)
_DispatchNames._modes.update({name: DispatchMode(name) for name in _BUILT_IN})
_DispatchNames._modes.update({name: DispatchMode(name, mesh="default") for name in _BUILT_IN_MESH})


class Execute(enum.Enum):
    """Which ranks run a method."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


def add_mode(mode: CustomMode) -> None:
    """Make ``Dispatch.<mode.name>`` known.

    Raises:
        DeclarationError: the name is taken, or is not an identifier.
    """
    if not mode.name.isidentifier():
        raise DeclarationError(
            f"dispatch mode name {mode.name!r}: expected an identifier such as 'TWO_TO_ALL'"
        )
    if mode.name in _DispatchNames._modes or hasattr(Dispatch, mode.name):
        raise DeclarationError(f"dispatch mode {mode.name!r} exists already; choose another name")
    _DispatchNames._modes[mode.name] = mode


def as_mode(given: object, where: str) -> DispatchMode | CustomMode:
    """The mode that ``given`` stands for: a mode, or a ``{"dispatch_fn": f, "collect_fn": g}`` pair.

    Raises:
        DeclarationError: it is neither; the message starts with ``where`` and lists what is known.
    """
    if isinstance(given, DispatchMode | CustomMode):
        return given
    if isinstance(given, dict):
        missing = [key for key in ("dispatch_fn", "collect_fn") if not callable(given.get(key))]
        unknown = sorted(set(given) - {"dispatch_fn", "collect_fn"})
        if missing or unknown:
            raise DeclarationError(
                f"{where}: a custom mode is a dict of two functions, "
                f'{{"dispatch_fn": f, "collect_fn": g}}; missing or not callable: {missing}, unknown: {unknown}'
            )
        return CustomMode(given["dispatch_fn"], given["collect_fn"])
    dispatch_fn, collect_fn = getattr(given, "dispatch", None), getattr(given, "collect", None)
    if callable(dispatch_fn) and callable(collect_fn):  # a scheme object
        return CustomMode(dispatch_fn, collect_fn, name=type(given).__name__)
    raise DeclarationError(
        f"{where}: unknown dispatch mode {given!r}; expected px.Dispatch.<{' | '.join(Dispatch.names())}>, "
        'px.Dispatch.mesh("name"), a {"dispatch_fn", "collect_fn"} pair, or an object with methods '
        "dispatch(group, *args, **kwargs) and collect(group, outputs)"
    )


def with_mesh(mode: DispatchMode, mesh: str) -> DispatchMode:
    """The same mode over another mesh."""
    return replace(mode, mesh=mesh)
