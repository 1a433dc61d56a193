"""Versions of weights: the result of a sync, and the published and accepted weights of a rank with their versions.

The state is on the rank, so that it applies to the calls of every driver. A registered method of a role is refused
while its weights are torn or lost, unless the method has ``needs_weights=False``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from phalanx.declare.context import WorkerContext
from phalanx.declare.weight_declarations import Accepted, Published, WeightsDeclared
from phalanx.display.text_format import size
from phalanx.errors import DeclarationError, WeightsError
from phalanx.wire.messages import WeightsKey

T = TypeVar("T")


@dataclass(frozen=True)
class WeightsVersion:
    """A version of weights that arrived completely.

    Attributes:
        number: the version, counted by the source; it never decreases.
        seconds: time from the first call until the driver knew that all had arrived: of a submitted sync, once it is
            awaited.
        nbytes: bytes of the tensors that arrived, summed over the target ranks.
        wire_bytes: bytes that the source ranks sent. Fewer than ``nbytes`` if several targets read the same memory
            or only changes were sent (``delta=True``).
        changed: number of tensors that differ from the version before, according to samples. All tensors count after
            a failed sync or a change of processes.
        step: the source's count of optimizer steps, if it has one.
    """

    number: int
    seconds: float
    nbytes: int
    changed: int
    step: int | None = None
    wire_bytes: int = 0

    def __str__(self) -> str:
        rate = f", {size(int(self.nbytes / self.seconds))}/s" if self.seconds > 0 else ""
        volume = f"{size(self.nbytes)} in {self.seconds:.3g} s{rate}"
        return f"version {self.number}: {volume}, {self.changed} tensors changed"


@dataclass(frozen=True)
class Weights:
    """The weights of a role under a name on a rank.

    Attributes:
        status: "none" (of no version), "complete" (of version ``number``) or "torn" (partly updated).
        number: the version. For torn weights it is the version that was being written; for weights that ``px.load`` or
            ``px.restore`` has replaced, the last version before.
        had: the complete version before, also of earlier processes of the rank; None before the first.
        connection: the connection over which a complete version arrived.
    """

    status: Literal["none", "complete", "torn"] = "none"
    number: int | None = None
    had: int | None = None
    connection: str = field(default="", repr=False, compare=False)

    @property
    def last(self) -> int | None:
        """The last complete version; None before the first."""
        return self.number if self.status == "complete" else self.had

    def refusal(self) -> str | None:
        """Return the reason why a method must not use these weights; None if it may."""
        if self.status == "torn":
            had = "no version before" if self.had is None else f"version {self.had} before"
            return f"a sync to version {self.number} was not completed: its parameters may be mixed ({had})"
        if self.status == "none" and self.had is not None and self.number is None:
            return f"its process was restarted after version {self.had}: it has the constructor's weights"
        return None

    def __str__(self) -> str:
        return "none" if self.status == "none" else f"{self.status}({self.number})"


class WeightRegistry:
    """The weights of a rank."""

    def __init__(self, context: WorkerContext) -> None:
        self.declared = WeightsDeclared.of(context)
        self._weights = {key: Weights(had=number) for key, number in context.had_weights.items()}
        self._counts = dict(context.published_weights)
        #: Ends of connections (``WeightEnd``) on this rank, by connection and side.
        self.ends: dict[str, dict[str, Any]] = {}
        for role in {role for role, _ in self._weights}:
            self._note_usable(role)

    def published(self, key: WeightsKey) -> Published:
        """Return the weights that a role publishes.

        Raises:
            DeclarationError: if it publishes none of that name.
        """
        return _declared(self.declared.published, key, "published", "publish")

    def accepted(self, key: WeightsKey) -> Accepted:
        """Return the weights that a role accepts.

        Raises:
            DeclarationError: if it accepts none of that name.
        """
        return _declared(self.declared.accepted, key, "accepted", "accept")

    def weights(self, key: WeightsKey) -> Weights:
        """Return the state of the weights of a role."""
        return self._weights.get(key, Weights())

    def newest(self, key: WeightsKey) -> int:
        """Return the newest version that this rank knows, as source or target; 0 before the first."""
        weights = self.weights(key)
        return max(self._counts.get(key, 0), weights.number or 0, weights.had or 0)

    def publish(self, key: WeightsKey, number: int, step: int | None, wanted: int | None) -> None:
        """Record that version ``number``, of optimizer step ``step``, is published, to each target of a sync in turn.

        Raises:
            WeightsError: if a later version was published before, or ``step`` is not ``wanted``.
            DeclarationError: if a step is wanted and the source has no count.
        """
        before = self._counts.get(key, 0)
        if number < before:
            raise WeightsError(
                f"weights {key[1]!r}: version {before} was published already, so this cannot be version {number}: "
                "another driver or px.WeightSync syncs from this source too; sync again"
            )
        if wanted is not None and step is None:
            raise DeclarationError(
                f"sync(step={wanted}) needs a source that counts its steps: publish_weights(..., step=function)"
            )
        if wanted is not None and step != wanted:
            raise WeightsError(
                f"the source is at step {step}, expected step {wanted}; nothing was transferred: sync after that step"
            )
        self._counts[key] = number
        self.declared.versions[key] = number

    def begin(self, key: WeightsKey, number: int) -> None:
        """Mark the weights as torn, before bytes of a version are written. May be called again.

        Raises:
            WeightsError: if ``number`` is lower than that of the last complete version.
        """
        before = self.weights(key)
        if before.number == number and before.status == "torn":
            return
        if before.last is not None and number < before.last:
            raise WeightsError(
                f"version {number} cannot follow version {before.last}, since versions never decrease: it is from "
                "another source, or from a source that was restarted without its count"
            )
        self.declared.coming[key] = number
        self._put(key, Weights("torn", number, before.last))

    def finish(self, key: WeightsKey, number: int, connection: str = "") -> None:
        """Mark the weights as complete: all of a version arrived over a connection and was verified."""
        self._put(key, replace(self.weights(key), status="complete", number=number, connection=connection))

    def tear(self, key: WeightsKey, number: int) -> None:
        """Mark the weights as torn again: the sync to a version failed on another rank, though it arrived here."""
        weights = self.weights(key)
        if weights.status == "complete" and weights.number == number:
            self._put(key, replace(weights, status="torn"))

    def loaded(self, role: str, model: Any) -> None:
        """Mark the weights as usable but of no version: a saved state was loaded into ``model``."""
        for key, accepted in self.declared.accepted.items():
            if key[0] == role and accepted.model is model is not None:
                last = self.weights(key).last
                self._put(key, Weights("none", last, last))

    def arrived_over(self, key: WeightsKey, connection: str) -> int:
        """Return the version that arrived over a connection and is complete; 0 if there is none."""
        weights = self.weights(key)
        return weights.number or 0 if weights.connection == connection else 0

    def _put(self, key: WeightsKey, weights: Weights) -> None:
        self._weights[key] = weights
        if weights.status == "complete" and weights.number is not None:
            self.declared.versions[key] = weights.number
        else:
            self.declared.versions.pop(key, None)
        self._note_usable(key[0])

    def _note_usable(self, role: str) -> None:
        """Update the reason why methods of ``role`` must not run."""
        reasons = [
            f"weights {name!r} of role {role!r} cannot be used: {reason}. Sync them first"
            for (owner, name), weights in sorted(self._weights.items(), key=lambda entry: entry[0])
            if owner == role and (reason := weights.refusal()) is not None
        ]
        if reasons:
            self.declared.torn[role] = reasons[0]
        else:
            self.declared.torn.pop(role, None)


def _declared(declarations: Mapping[WeightsKey, T], key: WeightsKey, done: str, verb: str) -> T:
    if key in declarations:
        return declarations[key]
    role, name = key
    names = sorted(other for owner, other in declarations if owner == role)
    elsewhere = sorted(owner for owner, other in declarations if other == name and owner != role)
    text = f"role {role!r}" if role else "this worker"
    hint = f" (role {elsewhere[0]!r} has them)" if elsewhere else ""
    raise DeclarationError(
        f"{text} has not {done} weights {name!r}; it has: {names or 'none'}{hint}. Call self.{verb}_weights({name!r}, "
        "...) in its constructor; or are the source and the target of the sync swapped?"
    )
