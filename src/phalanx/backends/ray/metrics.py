"""Export of calls, seconds, failures and bytes as Ray metrics, for its dashboard and Prometheus.

Metric objects of Ray cost some microseconds at each use (a tenth of a percent of an empty call, but for each rank). So
calls only append to a buffer, and the background thread exports it every few seconds. Without an exporter, a call costs
the test of an attribute. Metrics of calls have no tag for the rank, because Ray keeps a time series for each
combination of tags.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from phalanx.config import settings
from phalanx.tracing.metric_buffer import MetricBuffer

EVERY_S = 5.0
_BOUNDARIES = [0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0]


class Exporter:
    """Exporter of a metric buffer to Ray."""

    def __init__(self, source: MetricBuffer) -> None:
        from ray.util import metrics  # imports for 0.1 s, which no start waits for

        tags = ("group", "method")
        self._source = source
        self._calls = metrics.Counter("phalanx_calls_total", "Calls that ended.", tag_keys=tags)
        self._failures = metrics.Counter("phalanx_failed_calls_total", "Calls that failed.", tag_keys=tags)
        self._seconds = metrics.Histogram(
            "phalanx_call_seconds",
            "From the sending of a call to its value or error.",
            boundaries=_BOUNDARIES,
            tag_keys=tags,
        )
        self._bytes = metrics.Counter(
            "phalanx_bytes_total",
            "Bytes sent in messages, stored beside them, and fetched by the driver.",
            tag_keys=("group", "kind"),
        )

    def flush(self) -> None:
        """Export the values that were recorded since the last call."""
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
    """Set the metric ``phalanx_{what}_{name}`` of ``rank`` for each named value. No effect if ``PHALANX_METRICS=0``."""
    if not settings().metrics:
        return
    with contextlib.suppress(Exception):  # errors of monitoring must not end the rank
        for name, value in values.items():
            _gauge(f"phalanx_{what}_{name}").set(value, tags={"rank": rank})


@functools.cache
def _gauge(name: str) -> Any:
    from ray.util import metrics  # imports for 0.1 s, so only if a rank measures something

    return metrics.Gauge(name, "Latest value reported by a rank.", tag_keys=("rank",))
