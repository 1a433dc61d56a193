"""Errors that are both this library's and of the type that verl raises in the same place."""

from __future__ import annotations

from phalanx.errors import DeclarationError, DispatchError, PlacementError


class CheckFailed(DeclarationError, AssertionError):
    """A wrong declaration or option, for which verl has an assertion."""


class CallCheckFailed(DispatchError, AssertionError):
    """Arguments or outputs that do not fit the dispatch mode, for which verl has an assertion."""


class UnusableValue(DeclarationError, ValueError):
    """A name of a method, a variable for ranks or a request for accelerators that a group cannot use."""


class NoSharedBase(DeclarationError, ValueError, AssertionError):
    """Roles of one process that do not all derive from ``Worker``."""


class NoFreePort(CheckFailed, RuntimeError):
    """No port of the given range is free."""


class NotEnoughGpus(PlacementError, ValueError):
    """The cluster has fewer accelerators than the pools ask for."""


class DirectCallOnly(DispatchError, NotImplementedError):
    """A call through the group of a method that serves rollout clients."""


class AlreadyImported(DeclarationError, ImportError):
    """A module of verl that was imported before Phalanx could replace it."""


class UnfitVerl(DeclarationError, ImportError):
    """The installed verl is missing, too old, too new, broken or imported in part."""


class VerlNotInstalled(DispatchError, ModuleNotFoundError):
    """A value or a dispatch mode needs an installed verl."""
