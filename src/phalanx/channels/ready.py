"""Rows that were accepted and wait to be trained on, in the order in which they will be. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Ready:
    """Rows `start` to `stop` of those that a lease accepted, whose first tokens are of `version`."""

    lease: int
    start: int
    stop: int
    version: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class ReadyRows:
    """In order of acceptance; `per_version` of them are trained on for one version."""

    def __init__(self, per_version: int, ready: tuple[Ready, ...] = ()) -> None:
        self._per_version = per_version
        self._ready = list(ready)

    def __iter__(self) -> Iterator[Ready]:
        return iter(self._ready)

    @property
    def rows(self) -> int:
        return sum(ready.rows for ready in self._ready)

    def append(self, lease: int, place: int, version: int) -> None:
        """Row `place` of those that the lease accepted."""
        last = self._ready[-1] if self._ready else None
        if last is not None and (last.lease, last.stop, last.version) == (lease, place, version):
            self._ready[-1] = replace(last, stop=place + 1)
        else:
            self._ready.append(Ready(lease, place, place + 1, version))

    def train(self, rows: int, first: int, last: int) -> dict[int, int]:
        """The first `rows` were trained on for versions `first` to `last`; how many had which lag."""
        lags: dict[int, int] = {}
        done = 0
        while done < rows:
            ready = self._ready.pop(0)
            version = min(first + done // self._per_version, last)
            step = min(ready.rows, rows - done, self._per_version - done % self._per_version)
            lags[version - ready.version] = lags.get(version - ready.version, 0) + step
            if step < ready.rows:
                self._ready.insert(0, replace(ready, start=ready.start + step))
            done += step
        return lags

    def evict(self, training: int, max_lag: int) -> list[Ready]:
        """Rows whose lag would be above `max_lag` leave; those behind them move up."""
        kept: list[Ready] = []
        gone: list[Ready] = []
        before = 0
        for ready in self._ready:
            places = (ready.version + max_lag + 1 - training) * self._per_version
            stays = min(ready.rows, max(places - before, 0))
            middle = ready.start + stays
            if stays:
                kept.append(replace(ready, stop=middle))
            if stays < ready.rows:
                gone.append(replace(ready, start=middle))
            before += stays
        self._ready = kept
        return gone

    def remove(self, lease: int, start: int, stop: int) -> int:
        """Rows `start` to `stop` of those that the lease accepted leave; how many of them were ready."""
        kept: list[Ready] = []
        for ready in self._ready:
            left = (ready.start, min(ready.stop, max(ready.start, start)))
            right = (max(ready.start, min(ready.stop, stop)), ready.stop)
            pieces = [left, right] if ready.lease == lease and start < stop else [(ready.start, ready.stop)]
            kept += [replace(ready, start=begin, stop=end) for begin, end in pieces if begin < end]
        removed = self.rows - sum(ready.rows for ready in kept)
        self._ready = kept
        return removed
