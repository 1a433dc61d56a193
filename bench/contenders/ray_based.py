"""What the contenders on Ray share: a cluster of their own, and one untimed run with the accounts open."""

from __future__ import annotations

from typing import Any

from bench.contenders import cluster
from bench.contenders.base import Contender


class RayContender(Contender):
    """A contender whose groups live on a Ray cluster that it starts itself."""

    def do_connect(self) -> dict[str, str]:
        return cluster.start()

    def do_account(self, scenario: str, parameters: dict[str, Any]) -> dict[str, int | None]:
        """Run a scenario once, untimed: store bytes made and most in use, bytes the driver read."""
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
        """The library's own growing counters, where it has any; reported beside the counted ones."""
        return {}
