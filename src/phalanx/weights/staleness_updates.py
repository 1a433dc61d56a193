"""What a sync of weights tells the staleness that paces its rollout: which version is in training, and which serves."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from phalanx.channels.staleness import StalenessManager
from phalanx.weights.versions import WeightsVersion


class Pacing:
    """The staleness of one ``px.WeightSync``, or none.

    A version is in training once it has been sent, since the trainer continues from it. New rows are of that version
    once the targets have it.
    """

    def __init__(self, staleness: StalenessManager | None) -> None:
        self._staleness = staleness
        self._step: int | None = None
        self._again = False

    def newest(self) -> int:
        """The version that numbers go on from: that in training, which a loaded staleness has from before."""
        return 0 if self._staleness is None else self._staleness.version

    def sent(self, version: WeightsVersion) -> None:
        """Note that a version was sent."""
        if self._staleness is None:
            return
        look = self._staleness.stats
        # The first version after a resume brings weights back: nothing was trained for it in this process.
        again = look.restored or (version.step is not None and version.step == self._step)
        again = again or (self._again and version.step is None)
        trained = 0 if again else min(self._staleness.rows_per_version, look.rows.ready)
        self._step = version.step
        self._staleness.advance(version.number, trained=trained, serving=False)

    @contextlib.contextmanager
    def brought_again(self) -> Generator[None]:
        """The time of a sync for ranks that are new: nothing was trained for it, unless its step says so."""
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def served(self, number: int) -> None:
        """The targets generate with it."""
        if self._staleness is not None:
            self._staleness.serve(number)
