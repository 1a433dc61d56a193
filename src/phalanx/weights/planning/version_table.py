"""Of which version the weights of a role are on a rank: none, whole or torn. Pure: states in, states out.

The state lives on the rank, so that calls of every driver meet it: a host asks :meth:`Weights.refusal` before it runs a
registered method of the role, unless that is registered with ``needs_weights=False``. A source has a :class:`Counter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.errors import DeclarationError, InternalError, WeightsError

__all__ = ["Counter", "Stillness", "VersionTable", "Weights"]

Status = Literal["none", "whole", "torn"]


@dataclass(frozen=True)
class Weights:
    """What one role has under one name on one rank.

    Attributes:
        status: "none" (those of the constructor), "whole" (all of version ``number``) or "torn" (of no one version).
        number: the version; of torn weights the one that was being written.
        had: the last whole version, also of processes before this one; None if there never was one.
    """

    status: Status = "none"
    number: int | None = None
    had: int | None = None

    def begin(self, number: int) -> Weights:
        """The first byte of version ``number`` may be written from now on.

        Raises:
            WeightsError: the number goes back.
        """
        if self.had is not None and number < self.had:
            raise WeightsError(
                f"version {number} was to follow version {self.had}; versions never go back: it comes from another "
                "source, or from a source that was restarted without its count"
            )
        return replace(self, status="torn", number=number)

    def finish(self, number: int) -> Weights:
        """All of version ``number`` has arrived and was verified."""
        if self.status != "torn" or self.number != number:
            raise InternalError(f"version {number} was finished, but the weights are {self}")
        return Weights("whole", number, number)

    def restarted(self) -> Weights:
        """The same role and name in a new process: its constructor's weights again."""
        lost = self.number if self.status == "torn" else None
        return Weights("none", None, self.had if self.had is not None else lost)

    def refusal(self) -> str | None:
        """Why a method may not run on these weights; None where it may."""
        if self.status == "torn":
            had = "no version before" if self.had is None else f"version {self.had} before"
            return f"a sync to version {self.number} did not end: its parameters may be mixed ({had})"
        if self.status == "none" and self.had is not None:
            return f"its process was restarted since it had version {self.had}: its weights are the constructor's again"
        return None

    def __str__(self) -> str:
        return "none" if self.status == "none" else f"{self.status}({self.number})"


@dataclass(frozen=True)
class VersionTable:
    """The weights of all roles of a rank, by (role, name). A value: every change gives a new one."""

    entries: Mapping[tuple[str, str], Weights] = field(default_factory=dict[tuple[str, str], Weights])

    def of(self, role: str, name: str) -> Weights:
        """What ``role`` has under ``name``."""
        return self.entries.get((role, name), Weights())

    def put(self, role: str, name: str, weights: Weights) -> VersionTable:
        """The ledger with one entry changed."""
        return VersionTable({**self.entries, (role, name): weights})

    def restarted(self) -> VersionTable:
        """As the next process of the rank begins."""
        return VersionTable({key: weights.restarted() for key, weights in self.entries.items()})

    def refusal(self, role: str) -> str | None:
        """Why methods of ``role`` may not run; of other roles nothing is asked."""
        for (owner, name), weights in sorted(self.entries.items()):
            why = weights.refusal() if owner == role else None
            if why is not None:
                return f"weights {name!r} of role {role!r} cannot be used: {why}. Sync them first"
        return None


@dataclass(frozen=True)
class Counter:
    """A source's count of versions, and of optimizer steps where the source tells them."""

    number: int = 0
    step: int | None = None

    def next(self, *, at_least: int = 0, step: int | None = None) -> Counter:
        """The version to publish now: one more than the last, and than any that a target has (``at_least``)."""
        return Counter(max(self.number, at_least) + 1, step)

    def check_step(self, wanted: int | None) -> None:
        """Refuse weights of another optimizer step than the caller expects.

        Raises:
            DeclarationError: the source tells no steps.
            WeightsError: it is at another one.
        """
        if wanted is None:
            return
        if self.step is None:
            raise DeclarationError(
                f"sync(step={wanted}) needs a source that tells its steps: publish_weights(..., step=function)"
            )
        if self.step != wanted:
            raise WeightsError(
                f"the source is at step {self.step}, but step {wanted} was asked for; nothing was moved: sync after "
                "the step that is meant"
            )


@dataclass(frozen=True)
class Stillness:
    """How many syncs in a row have changed nothing: a trainer that does not train."""

    row: int = 0

    def after(self, changed: int) -> Stillness:
        """The count after a sync that changed so many elements or tensors."""
        return Stillness(0 if changed else self.row + 1)

    def warning(self, *, expect_change: bool = False) -> str | None:
        """What to warn of after a sync; None where all is well. ``expect_change`` does not wait for a second one."""
        if self.row == 0 or (self.row == 1 and not expect_change):
            return None
        times = "the sync" if self.row == 1 else f"{self.row} syncs in a row"
        return f"{times} changed nothing: the source publishes weights that stay as they are; does it train them?"
