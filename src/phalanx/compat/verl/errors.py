"""Errors of the drop-in: instances both of this library's and of what verl raises in the same place."""

from __future__ import annotations

from phalanx.errors import DeclarationError, DispatchError, PlacementError


class CheckFailed(DeclarationError, AssertionError):
    """Something was declared or configured wrongly, where verl has an assertion."""


class CallCheckFailed(DispatchError, AssertionError):
    """Arguments of a call, or outputs of its ranks, do not fit its mode, where verl has an assertion."""


class SystemVariables(DeclarationError, ValueError):
    """Variables for a group's ranks include some that the controller itself sets."""


class NotEnoughGpus(PlacementError, ValueError):
    """The cluster has fewer accelerators than the pools ask for."""


class DirectCallOnly(DispatchError, NotImplementedError):
    """A method that serves rollout clients was called through its group."""
