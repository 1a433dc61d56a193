"""What the host of a worker process needs of the backend that made the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from phalanx.topology.slots import SlotFacts


class Services(Protocol):
    """What a backend offers to the host in its process."""

    @property
    def in_driver(self) -> bool:
        """Whether the ranks share the driver's process (and so its environment and its event loop)."""
        ...

    def facts(self) -> tuple[SlotFacts, tuple[str, ...]]:
        """Where this process runs, and its log files."""
        ...

    def folder(self) -> str:
        """Where this process may keep files of its own, on its node; made when it is first written to."""
        ...

    def put(self, value: Any) -> Any:
        """Store a value; a reference to it, which other processes of the cluster can fetch."""
        ...

    def fetch(self, refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """The values behind the backend's references. Raises TimeoutError if that takes longer."""
        ...
