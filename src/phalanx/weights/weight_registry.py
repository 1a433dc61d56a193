"""The weight registry of a rank: published and accepted weights, their versions, and the rank's part of syncs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.declare.weight_declarations import Accepted, Published, WeightsDeclared
from phalanx.errors import DeclarationError, WeightsError
from phalanx.weights.versions import Key, Weights, check_step, refusal_of


class Arrival(NamedTuple):
    """A version that arrived over a connection, and the weights before it."""

    connection: str
    before: Weights


class WeightRegistry:
    """The weights of a rank. ``unusable`` has, by role, the reason why its methods must not run."""

    def __init__(
        self, declared: WeightsDeclared, had: Mapping[Key, int], published: Mapping[Key, int]
    ) -> None:
        self.declared = declared
        self._weights = {key: Weights(had=number) for key, number in had.items()}
        self._counts = dict(published)
        self._published_to: dict[Key, tuple[str, ...]] = {}
        self._arrivals: dict[Key, Arrival] = {}
        self.unusable = declared.torn
        #: This rank's parts of syncs, by side and connection.
        self.parts: dict[tuple[str, str], Any] = {}
        #: Digests of published tensors by (role, name), sync and version; they tell which tensors changed.
        self.samples: dict[tuple[Key, str], dict[int, dict[str, bytes]]] = {}
        for role in {role for role, _ in had}:
            self._note_usable(role)

    def published(self, key: Key) -> Published:
        """Return the weights that a role publishes.

        Raises:
            DeclarationError: if it publishes none of that name.
        """
        declaration = self.declared.published.get(key)
        if declaration is None:
            raise DeclarationError(_unknown("published", "publish", key, self.declared.published))
        return declaration

    def accepted(self, key: Key) -> Accepted:
        """Return the weights that a role accepts.

        Raises:
            DeclarationError: if it accepts none of that name.
        """
        declaration = self.declared.accepted.get(key)
        if declaration is None:
            raise DeclarationError(_unknown("accepted", "accept", key, self.declared.accepted))
        return declaration

    def weights(self, key: Key) -> Weights:
        """Return the state of the weights of a role."""
        return self._weights.get(key, Weights())

    def newest(self, key: Key) -> int:
        """Return the newest version that this rank knows, as source or target; 0 before the first."""
        weights = self.weights(key)
        return max(self._counts.get(key, 0), weights.number or 0, weights.had or 0)

    def publish(self, key: Key, connection: str, number: int, step: int | None, wanted: int | None) -> None:
        """Note that version ``number``, of optimizer step ``step``, is published over a connection.

        A version goes to several groups of targets, once to each.

        Raises:
            WeightsError: if a later version was published before, or ``step`` is not ``wanted``.
            DeclarationError: if a step is wanted and the source has no count.
        """
        before, others = self._counts.get(key, 0), self._published_to.get(key, ())
        again = number == before and bool(others) and connection not in others
        if number <= before and not again:
            raise WeightsError(
                f"weights {key[1]!r}: version {before} was published already, so this cannot be version {number}: "
                "another driver or px.WeightSync syncs from this source too; sync again"
            )
        check_step(step, wanted)
        self._counts[key] = number
        self._published_to[key] = (*others, connection) if again else (connection,)
        self.declared.versions[key] = number

    def begin(self, key: Key, number: int) -> None:
        """Note that the first byte of a version may be written from now on."""
        self.declared.coming[key] = number
        self._put(key, self.weights(key).begin(number))
        self._arrivals.pop(key, None)

    def finish(self, key: Key, number: int, connection: str = "") -> None:
        """Note that all of a version arrived over a connection and was verified."""
        before = self.weights(key)
        self._put(key, before.finish(number))
        self._arrivals[key] = Arrival(connection, before)

    def tear(self, key: Key, number: int) -> None:
        """Note that the sync to a version failed on another rank: the role has no version, though it arrived here."""
        if self.weights(key) == Weights("whole", number, number) and key in self._arrivals:
            self._put(key, self._arrivals.pop(key).before)

    def arrived_over(self, key: Key, connection: str) -> int | None:
        """Return the version that arrived over a connection and is complete; None if there is none."""
        arrival = self._arrivals.get(key)
        return self.weights(key).number if arrival is not None and arrival.connection == connection else None

    def _put(self, key: Key, weights: Weights) -> None:
        self._weights[key] = weights
        if weights.status == "whole" and weights.number is not None:
            self.declared.versions[key] = weights.number
        else:
            self.declared.versions.pop(key, None)
        self._note_usable(key[0])

    def _note_usable(self, role: str) -> None:
        reason = refusal_of(role, self._weights)
        if reason is None:
            self.unusable.pop(role, None)
        else:
            self.unusable[role] = reason


def _unknown(done: str, verb: str, key: Key, known: Mapping[Key, object]) -> str:
    role, name = key
    names = sorted(other for owner, other in known if owner == role)
    elsewhere = sorted(owner for owner, other in known if other == name and owner != role)
    text = f"role {role!r}" if role else "this worker"
    hint = f" (role {elsewhere[0]!r} has them)" if elsewhere else ""
    return (
        f"{text} has not {done} weights {name!r}; it has: {names or 'none'}{hint}. Call self.{verb}_weights({name!r}, "
        "...) in its constructor"
    )
