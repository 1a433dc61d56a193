"""Errors of the drop-in: instances both of this library's and of what verl raises in the same place."""

from __future__ import annotations

from phalanx.errors import DeclarationError, DispatchError, PlacementError


class CheckFailed(DeclarationError, AssertionError):
    """Something was declared or configured wrongly, where verl has an assertion."""


class CallCheckFailed(DispatchError, AssertionError):
    """Arguments of a call, or outputs of its ranks, do not fit its mode, where verl has an assertion."""


class UnusableName(DeclarationError, ValueError):
    """A registered method cannot be bound under its name."""


class NoSharedBase(DeclarationError, ValueError, AssertionError):
    """Roles of one process do not all derive from ``Worker``; verl has an assertion or a ValueError, by their names."""


class NoFreePort(CheckFailed, RuntimeError):
    """No port of the given range is free."""


class SystemVariables(DeclarationError, ValueError):
    """Variables for a group's ranks include some that the controller itself sets."""


class NoAccelerators(DeclarationError, ValueError):
    """Ranks with accelerators are asked for on slots that have none."""


class NotEnoughGpus(PlacementError, ValueError):
    """The cluster has fewer accelerators than the pools ask for."""


class DirectCallOnly(DispatchError, NotImplementedError):
    """A method that serves rollout clients was called through its group."""


class AlreadyImported(DeclarationError, ImportError):
    """Something of verl is in use in this process that was to come from here."""


class UnfitVerl(DeclarationError, ImportError):
    """The installed verl is missing, too old, too new, broken or imported in part."""


class VerlNotInstalled(DispatchError, ModuleNotFoundError):
    """A value or a dispatch mode needs an installed verl."""
