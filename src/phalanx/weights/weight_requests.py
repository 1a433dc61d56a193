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


@dataclass(frozen=True)
class WeightsName:
    """The weights that ``role`` publishes (as a source) or accepts (as a target) under ``name``."""

    side: Side
    role: str
    name: str

    @property
    def key(self) -> Key:
        """Role and name."""
        return self.role, self.name


@dataclass(frozen=True)
class Description:
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
    number: int = 0
    share: bool = False
    store: str = ""


@dataclass(frozen=True)
class ConnectRequest:
    """Create this rank's endpoints for a plan.

    Attributes:
        connection: name of the connection between two group epochs; never used twice.
        ranks: ranks of this side's group, in the plan's order.
        complete: manifest of a target that takes all complete tensors of the source.
        bucket_bytes: maximum size of a bucket.
        transports: transport of each locality.
        addresses: addresses of the sources' endpoints.
        store: address of the rendezvous store over which a process group is created.
        timeout: seconds to connect.
        delta: True if only changes are sent, if the transport supports it.
    """

    connection: str
    weights: WeightsName
    ranks: tuple[int, ...]
    plan: Plan
    complete: Manifest | None
    bucket_bytes: int
    transports: Mapping[Locality, str]
    addresses: Mapping[int, Any] = field(default_factory=dict[int, Any])
    store: str = ""
    timeout: float = 60.0
    delta: bool = False


class Connected(NamedTuple):
    """Response of a connected rank: its address, or the reason why it cannot use a transport."""

    address: Any = None
    refusal: str = ""


class LastVersion(NamedTuple):
    """The last version that arrived completely through a driver's ``sync``; 0 before the first."""

    sync: str
    number: int = 0


@dataclass(frozen=True)
class SyncRequest:
    """Send, or receive, version ``number`` over ``connection``.

    Attributes:
        step: count of optimizer steps that the caller expects.
        last: version to which changed tensors are compared.
        known: version that all targets received over this connection and still have; None: everything is sent.
    """

    connection: str
    number: int
    verify: Verify
    timeout: float
    last: LastVersion
    step: int | None = None
    known: int | None = None


class Sent(NamedTuple):
    """Response of a source: bytes, count of optimizer steps, and changes.

    ``changed`` has a byte for each source name of the plan, in order: whether this rank's values differ from the last
    version.
    """

    nbytes: int
    changed: bytes
    step: int | None


class Arrived(NamedTuple):
    """Response of a target: bytes, seconds, and (source rank, transport, bytes)."""

    nbytes: int
    seconds: float
    by_source: tuple[tuple[int, str, int], ...]


class SyncResponse(NamedTuple):
    """Response of a rank as source and as target; None if the rank is not on that side."""

    sent: Sent | None
    arrived: Arrived | None
