"""Requests of a driver to ranks for a sync of weights, and their responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from phalanx.weights.digests import Verify
from phalanx.weights.manifest import Manifest
from phalanx.weights.plan import Locality, Plan, RankLocation
from phalanx.weights.versions import Key

Side = Literal["source", "target"]


class Description(NamedTuple):
    """The weights of a rank.

    Attributes:
        manifest: manifest of its tensors; None for a target that takes all complete tensors of the source.
        location: place of the rank.
        number: newest version that the rank knows; 0 before the first.
        share: True if the rank wants the source's storage.
        store: address of its group's rendezvous store, as "host:port/epoch".
    """

    manifest: Manifest | None
    location: RankLocation
    number: int
    share: bool
    store: str


@dataclass(frozen=True)
class ConnectRequest:
    """Create this rank's endpoints for a plan.

    Attributes:
        connection: name of the connection between two group epochs; never used twice.
        bucket_bytes: maximum size of a bucket.
        transports: transport of each locality.
        complete: manifest of a target that takes all complete tensors of the source.
        store: address of the rendezvous store over which a process group is created, as "host:port".
        delta: True if only changes are sent, if the transport supports it.
        side, key: the weights.
        ranks: ranks of this side's group, in the plan's order.
        addresses: addresses of the sources' endpoints, for targets.
    """

    connection: str
    plan: Plan
    bucket_bytes: int
    transports: Mapping[Locality, str]
    complete: Manifest = field(default=Manifest(()))
    store: str = ""
    delta: bool = False
    side: Side = "source"
    key: Key = "", ""
    ranks: tuple[int, ...] = ()
    addresses: Mapping[int, Any] = field(default_factory=dict[int, Any])

    def localities(self, transport: str) -> list[Locality]:
        """Return the localities that a transport serves."""
        return [locality for locality, name in self.transports.items() if name == transport]


class SyncRequest(NamedTuple):
    """Send, or receive, version ``number`` over ``connection``.

    Attributes:
        step: count of optimizer steps that the caller expects.
        known: version that all targets received over this connection and still have; None: everything is sent.
    """

    connection: str
    number: int
    verify: Verify
    timeout: float
    step: int | None
    known: int | None = None


class Sent(NamedTuple):
    """Response of a source: bytes, count of optimizer steps, and changes.

    ``changed`` has a byte for each source name of the plan, in order: whether this rank's values differ from the last
    version over this connection.
    """

    nbytes: int
    changed: bytes
    step: int | None
