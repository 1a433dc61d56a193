"""When a sync compares its engines with its source."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from phalanx.errors import DeclarationError
from phalanx.runtime.links.pairing import Pair
from phalanx.runtime.links.probing import send_probe
from phalanx.runtime.links.sync_future import PairCalls
from phalanx.runtime.links.versions import Version
from phalanx.show.users_line import users_line
from phalanx.transfer.digests import Verify

__all__ = ["Probing"]


class Probing:
    """Of one sync: after the first version that goes over a pair, and where all is to be verified.

    Args:
        wanted: as given to ``px.WeightSync``.
    """

    def __init__(self, wanted: bool | float) -> None:
        if not isinstance(wanted, bool) and not wanted > 0:
            raise DeclarationError(
                f"px.WeightSync(probe={wanted!r}): give True, False, or the mean difference of log-probabilities that "
                "is allowed"
            )
        self._wanted = wanted
        self._done: set[str] = set()
        self._said = False

    def due(self, pair: Pair, verify: Verify) -> bool:
        """Whether this sync of a pair compares."""
        due = verify == "full" or (verify == "sampled" and pair.key not in self._done)
        return self._wanted is not False and due and bool(pair.probe.prompts) and not pair.probe.mute

    def behind(self, calls: PairCalls) -> PairCalls:
        """With what the source is asked behind the calls of a sync that compares: nothing trains in between."""
        pair = calls.pair
        within = pair.probe.within if self._wanted is True else float(self._wanted)
        if pair.target.core.transport.immediate and any(call.has_failed() for call in calls.parts):
            return calls  # its ranks have run, and failed: there is nothing to compare
        return replace(calls, probe=send_probe(pair.source, pair.probe, within))

    def ended(self, version: Version, pairs: Sequence[Pair], name: str) -> None:
        """A version arrived: say once if it was to be compared and could not be."""
        mute = next((pair.probe.mute for pair in pairs if pair.probe.prompts and pair.probe.mute), "")
        if version.probe is not None:
            self._done = {pair.key for pair in pairs}
        why = version.not_probed or mute
        if self._wanted is not False and why and not self._said:
            self._said = True
            warnings.warn(
                f"weights {name!r}, version {version.number}: the engine's log-probabilities are not compared with "
                f"those of its source: {why}. Give publish_weights(..., log_probs=function), or "
                "px.WeightSync(probe=False)",
                RuntimeWarning,
                users_line(),
            )
