"""Base of the contenders on Ray: a cluster of their own, and an untimed run that counts bytes."""

from __future__ import annotations

from typing import Any

from bench.contenders import cluster
from bench.contenders.base import Contender


class RayContender(Contender):
    """A contender whose groups live on a Ray cluster of its own."""

    def do_connect(self) -> dict[str, str]:
        return cluster.start()

    def do_account(self, scenario: str, parameters: dict[str, Any]) -> dict[str, int | None]:
        """Run a scenario once, untimed. Return store bytes created and most in use, and bytes that the driver read."""
        before = self.counters()
        with cluster.StoreWatch() as store, cluster.counting_fetches() as fetched:
            self.handle(scenario, parameters)
        after = self.counters()
        own = {name: after[name] - before.get(name, 0) for name in after}
        return {
            "store_peak": store.peak,
            "store_created": store.created,
            "driver_fetched": fetched.total,
            **own,
        }

    def counters(self) -> dict[str, int]:
        """Return the library's own counters, if it has any; they are reported next to the counted bytes."""
        return {}
