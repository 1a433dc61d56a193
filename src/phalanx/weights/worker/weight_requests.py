"""What a driver asks of ranks for a sync of weights, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.weights.planning.digests import Verify
from phalanx.weights.planning.locality import Hop, Place
from phalanx.weights.planning.resharding_plan import Plan
from phalanx.weights.planning.shard_manifest import Manifest

Side = Literal["source", "target"]

DELTA_MOVERS = ("segments", "store")
"""Those that bring only what changed, where that is asked for; the others bring everything."""

IN_PLACE = "in place"
"""In place of segments, where the targets load: their sources write straight into what they load from."""


@dataclass(frozen=True)
class Asked:
    """Which weights: those that ``role`` publishes (as a source) or accepts (as a target) under ``name``."""

    side: Side
    role: str
    name: str


@dataclass(frozen=True)
class Description:
    """What a rank has of the weights asked for.

    Attributes:
        manifest: of its tensors; None for a target that takes all that the source has, whole.
        place: where the rank is.
        number: the newest version that it knows of; 0 if there was none.
        share: it wants the source's storage. load: it hands the tensors to a function. placed: out of a
            segment of its own.
        store: address of its group's rendezvous store, as "host:port/epoch".
    """

    manifest: Manifest | None
    place: Place
    number: int = 0
    share: bool = False
    load: bool = False
    store: str = ""
    placed: bool = False


@dataclass(frozen=True)
class ConnectRequest:
    """Make the ends of this rank for a plan.

    Attributes:
        key: of the pair of epochs and the attempt; never used twice.
        ranks: of this side's group, in the plan's order.
        given: what each target takes, where it did not say so itself.
        bucket_bytes: of a bucket at most.
        movers: what carries each hop.
        addresses: of the sources' rings.
        store: address of the rendezvous store that a process group over both sides is made by.
        timeout: seconds in which such a group must be made.
        delta: only what changed travels, where the mover can do that.
    """

    key: str
    asked: Asked
    ranks: tuple[int, ...]
    plan: Plan
    given: Manifest | None
    bucket_bytes: int
    movers: Mapping[Hop, str]
    addresses: Mapping[int, str] = field(default_factory=dict[int, str])
    store: str = ""
    timeout: float = 60.0
    delta: bool = False


class Joined(NamedTuple):
    """A rank's ends are there: the digest of the plan that it has, and the address of its ring."""

    digest: str
    address: str = ""


class Since(NamedTuple):
    """The last version that arrived whole through ``link``, a driver's sync; 0 before the first."""

    link: str
    number: int = 0


_NOTHING = Since("")


@dataclass(frozen=True)
class SyncRequest:
    """Send, or receive, version ``number`` over the ends that were made for ``key``.

    ``step`` is the source's count of optimizer steps that the caller asks for; what changed is told ``since`` then.
    ``known`` is the version that all targets have got whole over these ends, and have still as far as the driver knows;
    None: everything is to be sent.
    """

    key: str
    number: int
    verify: Verify
    timeout: float
    step: int | None = None
    since: Since = _NOTHING
    known: int | None = None


class Sent(NamedTuple):
    """What a source did: bytes, seconds, and its count of optimizer steps, where it tells that.

    ``changed`` has a byte for each source name of the plan, in order: whether this rank's values of it are others than
    in the version that arrived before.
    """

    nbytes: int
    seconds: float
    changed: bytes
    step: int | None


class Arrived(NamedTuple):
    """What came to a target: bytes, seconds, and bytes by source rank and mover."""

    nbytes: int
    seconds: float
    by_source: tuple[tuple[int, str, int], ...]


class TookPart(NamedTuple):
    """A rank's part in a sync, as source and as target; None if the rank is not on that side."""

    sent: Sent | None
    arrived: Arrived | None
