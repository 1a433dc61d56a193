"""Versions of weights: the state of a role's weights on a rank, a source's count, and the result of a sync. Pure.

The state is on the rank, so that it applies to the calls of every driver. A registered method of a role is refused
while its weights are torn or lost, unless the method has ``needs_weights=False``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from phalanx.display.byte_format import size
from phalanx.errors import DeclarationError, InternalError, WeightsError

Key = tuple[str, str]
"""Role and name of weights."""


@dataclass(frozen=True)
class Weights:
    """The weights of a role under a name on a rank.

    Attributes:
        status: "none" (from the constructor), "whole" (complete, of version ``number``) or "torn" (partly updated).
        number: the version; of torn weights the version that was being written.
        had: the last complete version, also of earlier processes of the rank; None before the first.
    """

    status: Literal["none", "whole", "torn"] = "none"
    number: int | None = None
    had: int | None = None

    def begin(self, number: int) -> Weights:
        """Return the state in which the first byte of version ``number`` may be written.

        Raises:
            WeightsError: if the number decreases.
        """
        if self.had is not None and number < self.had:
            raise WeightsError(
                f"version {number} cannot follow version {self.had}, since versions never decrease: it is from another "
                "source, or from a source that was restarted without its count"
            )
        return replace(self, status="torn", number=number)

    def finish(self, number: int) -> Weights:
        """Return the state in which all of version ``number`` has arrived and was verified."""
        if self.status != "torn" or self.number != number:
            raise InternalError(f"version {number} was finished, but the weights are {self}")
        return Weights("whole", number, number)

    def refusal(self) -> str | None:
        """Return the reason why a method must not use these weights; None if it may."""
        if self.status == "torn":
            had = "no version before" if self.had is None else f"version {self.had} before"
            return f"a sync to version {self.number} did not end: its parameters may be mixed ({had})"
        if self.status == "none" and self.had is not None:
            return f"its process was restarted since it had version {self.had}: its weights are the constructor's again"
        return None

    def __str__(self) -> str:
        return "none" if self.status == "none" else f"{self.status}({self.number})"


def refusal_of(role: str, entries: Mapping[Key, Weights]) -> str | None:
    """Return the reason why methods of ``role`` must not run; None if they may."""
    for (owner, name), weights in sorted(entries.items(), key=lambda entry: entry[0]):
        reason = weights.refusal() if owner == role else None
        if reason is not None:
            return f"weights {name!r} of role {role!r} cannot be used: {reason}. Sync them first"
    return None


def check_step(step: int | None, wanted: int | None) -> None:
    """Reject weights of another optimizer step than ``wanted``.

    Raises:
        DeclarationError: if the source does not count its steps.
        WeightsError: if it is at another step.
    """
    if wanted is None:
        return
    if step is None:
        raise DeclarationError(
            f"sync(step={wanted}) needs a source that counts its steps: publish_weights(..., step=function)"
        )
    if step != wanted:
        raise WeightsError(
            f"the source is at step {step}, but step {wanted} was asked for; nothing was moved: sync after that step"
        )


@dataclass(frozen=True)
class UnchangedCounter:
    """The number of consecutive syncs that changed nothing, as when a trainer does not train."""

    syncs: int = 0

    def after(self, changed: int) -> UnchangedCounter:
        """Return the count after a sync that changed ``changed`` tensors."""
        return UnchangedCounter(0 if changed else self.syncs + 1)

    def warning(self, *, expect_change: bool) -> str | None:
        """Return a warning, at the second sync or, with ``expect_change``, at the first; else None."""
        if self.syncs == 0 or (self.syncs == 1 and not expect_change):
            return None
        times = "the sync" if self.syncs == 1 else f"{self.syncs} syncs in a row"
        return (
            f"{times} changed nothing: the source publishes the same weights again; check that it trains them"
        )


class Transfer(NamedTuple):
    """Bytes from a source rank to a target rank of ``group``, its transport, and the seconds on that target."""

    source: int
    group: str
    target: int
    transport: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class WeightsVersion:
    """A version of weights that arrived completely.

    Attributes:
        number: the version, counted by the source; it never decreases.
        seconds: time from the first call to the last response.
        nbytes: bytes of the tensors that arrived, summed over the target ranks.
        wire_bytes: bytes that the source ranks sent. Fewer than ``nbytes`` if several targets read the same memory
            or only changes were sent (``delta=True``).
        changed: number of tensors that differ from the version before, according to samples.
        step: the source's count of optimizer steps, if it has one.
        moved: bytes by pair of ranks.
    """

    number: int
    seconds: float
    nbytes: int
    changed: int
    step: int | None = None
    moved: tuple[Transfer, ...] = field(default=(), repr=False)
    wire_bytes: int = 0

    def __str__(self) -> str:
        rate = f", {size(int(self.nbytes / self.seconds))}/s" if self.seconds > 0 else ""
        volume = f"{size(self.nbytes)} in {self.seconds:.3g} s{rate}"
        return f"version {self.number}: {volume}, {self.changed} tensors changed"
