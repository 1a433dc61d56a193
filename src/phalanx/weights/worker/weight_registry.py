"""What a rank publishes and accepts, in which versions, and whether its methods may run on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.declare.weight_declarations import Accepted, Published, WeightsDeclared
from phalanx.errors import DeclarationError, WeightsError
from phalanx.weights.planning.version_table import Counter, VersionTable, Weights

Key = tuple[str, str]
"""Role and name."""


class Came(NamedTuple):
    """Version ``number`` came whole over the ends ``by``."""

    by: str
    number: int


class WeightRegistry:
    """Of one rank. ``unusable`` says, by role, why its methods may not run; the host asks it before each call."""

    def __init__(
        self, declared: WeightsDeclared, had: Mapping[Key, int], published: Mapping[Key, int]
    ) -> None:
        self.declared = declared
        self._ledger = VersionTable({key: Weights(had=number) for key, number in had.items()})
        self._counters = {key: Counter(number) for key, number in published.items()}
        self._published_to: dict[Key, tuple[str, ...]] = {}
        self._arrived: dict[Key, Came] = {}
        self._begun: dict[Key, Weights] = {}
        self.unusable = declared.torn
        #: This rank's parts of syncs, by side and key of each.
        self.ends: dict[tuple[str, str], Any] = {}
        #: Digests of what was published, by (role, name) and sync, version and tensor: they tell what changed.
        self.seen: dict[tuple[Key, str], dict[int, dict[str, bytes]]] = {}
        for role in {role for role, _ in had}:
            self._note_usable(role)

    def published(self, key: Key) -> Published:
        """What a role publishes.

        Raises:
            DeclarationError: nothing of that name.
        """
        found = self.declared.published.get(key)
        if found is None:
            raise DeclarationError(_unknown("published", "publish", key, list(self.declared.published)))
        return found

    def accepted(self, key: Key) -> Accepted:
        """What a role accepts.

        Raises:
            DeclarationError: nothing of that name.
        """
        found = self.declared.accepted.get(key)
        if found is None:
            raise DeclarationError(_unknown("accepted", "accept", key, list(self.declared.accepted)))
        return found

    def of(self, key: Key) -> Weights:
        """Of which version the weights of a role are."""
        return self._ledger.of(*key)

    def newest(self, key: Key) -> int:
        """The newest version that this rank has heard of, as source or target; 0 if there was none."""
        counter, weights = self._counters.get(key, Counter()), self.of(key)
        return max(counter.number, weights.number or 0, weights.had or 0)

    def publish(self, key: Key, to: str, number: int, step: int | None, wanted: int | None) -> None:
        """Note that version ``number`` is being published to the ends ``to``, made by optimizer step ``step``.

        One version goes to several groups of targets, once to each.

        Raises:
            WeightsError: a later one was published before, or the step is not the one ``wanted``.
            DeclarationError: a step is wanted, and the source tells none.
        """
        before = self._counters.get(key, Counter())
        others = self._published_to.get(key, ())
        again = number == before.number and bool(others) and to not in others
        if number <= before.number and not again:
            raise WeightsError(
                f"weights {key[1]!r}: version {before.number} was published already, so this cannot be version "
                f"{number}; somebody else syncs from this source too: sync again"
            )
        counter = Counter(number, step)
        counter.check_step(wanted)
        self._counters[key] = counter
        self._published_to[key] = (*others, to) if again else (to,)
        self.declared.versions[key] = number

    def begin(self, key: Key, number: int) -> None:
        """The first byte of a version may be written from now on."""
        self.declared.coming[key] = number
        self._put(key, self.of(key).begin(number))
        self._arrived.pop(key, None)

    def finish(self, key: Key, number: int, by: str = "") -> None:
        """All of a version has arrived and was verified, over the ends ``by``."""
        begun = self.of(key)
        self._put(key, begun.finish(number))
        self._arrived[key] = Came(by, number)
        self._begun[key] = begun

    def tear(self, key: Key, number: int) -> None:
        """The sync of that version failed on another rank: it is no version of the role, though all of it is here."""
        if self.of(key) == Weights("whole", number, number):
            self._put(key, self._begun[key])
            self._arrived.pop(key, None)

    def arrived(self, key: Key) -> Came | None:
        """How the version came that is whole here now."""
        return self._arrived.get(key)

    def _put(self, key: Key, weights: Weights) -> None:
        self._ledger = self._ledger.put(*key, weights)
        if weights.status == "whole" and weights.number is not None:
            self.declared.versions[key] = weights.number
        else:
            self.declared.versions.pop(key, None)
        self._note_usable(key[0])

    def _note_usable(self, role: str) -> None:
        why = self._ledger.refusal(role)
        if why is None:
            self.unusable.pop(role, None)
        else:
            self.unusable[role] = why


def _unknown(done: str, verb: str, key: Key, known: list[Key]) -> str:
    role, name = key
    names = sorted(other for where, other in known if where == role)
    elsewhere = sorted(where for where, other in known if other == name and where != role)
    text = f"role {role!r}" if role else "this worker"
    hint = f" (role {elsewhere[0]!r} has them)" if elsewhere else ""
    return (
        f"{text} has not {done} weights {name!r}; it has: {names or 'none'}{hint}. Call self.{verb}_weights({name!r}, "
        "...) in its constructor"
    )
