"""Calls, seconds, failures and bytes in Ray's own metrics, which its dashboard and Prometheus show.

Metric objects of Ray cost some microseconds at each use (a tenth of a percent of an empty call, but for each rank),
so calls only append to a list, which the background thread hands over every few seconds. There are no tags by rank: Ray
keeps a time series for each combination of tags.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from phalanx.config import settings
from phalanx.display.metric_buffer import MetricBuffer
from phalanx.wire.value import Value

EVERY_S = 5.0
_BOUNDARIES = [0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0]


class Exporter:
    """Hands the contents of a metric buffer to Ray, or to ``made_of`` in place of the module ``ray.util.metrics``."""

    def __init__(self, source: MetricBuffer, made_of: Value = None) -> None:
        if made_of is None:
            from ray.util import metrics as made_of  # takes a tenth of a second, which no start waits for
        tags = ("group", "method")
        self._source = source
        self._calls = made_of.Counter("phalanx_calls_total", "Calls that ended.", tag_keys=tags)
        self._failures = made_of.Counter("phalanx_failed_calls_total", "Calls that failed.", tag_keys=tags)
        self._seconds = made_of.Histogram(
            "phalanx_call_seconds",
            "From the sending of a call to its value or error.",
            boundaries=_BOUNDARIES,
            tag_keys=tags,
        )
        self._bytes = made_of.Counter(
            "phalanx_bytes_total",
            "Bytes sent in messages, stored beside them, and fetched by the driver.",
            tag_keys=("group", "kind"),
        )

    def flush(self) -> None:
        """Hand over the values since the last call."""
        ended, moved = self._source.drain()
        for one in ended:
            tags = {"group": one.group, "method": one.method}
            self._calls.inc(1, tags=tags)
            if one.failed:
                self._failures.inc(1, tags=tags)
            self._seconds.observe(one.seconds, tags=tags)
        for group, kind, nbytes in moved:
            self._bytes.inc(nbytes, tags={"group": group, "kind": kind})


def show(what: str, rank: str, values: Mapping[str, float]) -> None:
    """Set the metric ``phalanx_{what}_{name}`` to each value, for ``rank``. Does nothing if ``PHALANX_METRICS=0``."""
    if not settings().metrics:
        return
    with contextlib.suppress(Exception):  # monitoring never ends what it looks at
        for name, value in values.items():
            _gauge(f"phalanx_{what}_{name}").set(value, tags={"rank": rank})


@functools.cache
def _gauge(name: str) -> Any:
    from ray.util import metrics  # takes a tenth of a second, which only who measures something spends

    return metrics.Gauge(name, "Of a rank, as it told it last.", tag_keys=("rank",))
