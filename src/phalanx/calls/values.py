"""Arguments by reference: values stored once, read only or stored in parts, and the capacity of the object store."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from phalanx.backends.backend_types import Backend, FetchFailed, Ref
from phalanx.collect.join import rows_between
from phalanx.dispatch.shardable import Marker
from phalanx.dispatch.split import Shard
from phalanx.display.text_format import size
from phalanx.errors import DeclarationError, DispatchError, PhalanxError
from phalanx.session.session import session
from phalanx.wire.codec import decoding, encode
from phalanx.wire.value import Reduced, Value

T = TypeVar("T")

_REMEMBERED = 1024
_REPORTED_WITHIN_S = 0.3  # the backend's statistics may lack values that were stored more recently
_LOOK_EVERY_S = 0.05
_FREED_WITHIN_S = 2.0  # the statistics may still count values that were dropped more recently
_ADVICE = (
    "Send fewer rows per call, drop px.put values and futures that are done with, or give the store more: "
    "px.init(object_store_memory=<bytes>)"
)


class StoreQuota:
    """Admits a call once the object store of this node has capacity for its values.

    Without flow control, a full store spills to disk, which is slower than the copies by an order of magnitude, and
    finally processes are killed for lack of memory. A call that does not fit next to the calls in flight waits for
    them; a call that does not fit at all fails.
    """

    unchecked = 32 << 20  # bytes; smaller requests are not checked
    #: Times and bytes of the values that this process has stored.
    _lately: ClassVar[deque[tuple[float, int]]] = deque(maxlen=_REMEMBERED)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def took(self, nbytes: int) -> None:
        """Note that a value of ``nbytes`` bytes was stored."""
        if nbytes >= self.unchecked // 32:
            self._lately.append((time.monotonic(), nbytes))

    def admit(
        self,
        sizes: Sequence[int],
        what: str = "the arguments of this call take",
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the store has capacity for values.

        Args:
            sizes: bytes of each value.
            what: subject of the error message.
            is_busy: returns whether a call is in flight.

        Raises:
            DispatchError: if the values do not fit, and no call is in flight whose end would free capacity.
        """
        nbytes = sum(sizes)
        if nbytes < self.unchecked:
            return
        space = self._backend.store()
        if space is None:
            return
        if nbytes > space.capacity:
            raise DispatchError(
                f"{what} {size(nbytes)} in the object store (the largest value {size(max(sizes))}), which holds "
                f"{size(space.capacity)} on this node. Nothing was sent. {_ADVICE}"
            )
        until = time.monotonic() + _FREED_WITHIN_S
        while space.free - self._unreported() < nbytes:
            if is_busy():
                until = time.monotonic() + _FREED_WITHIN_S
            elif time.monotonic() > until:
                raise DispatchError(
                    f"{what} {size(nbytes)} in the object store, of which {size(max(0, space.free))} of "
                    f"{size(space.capacity)} are free on this node, and no call in flight would free more. "
                    f"Nothing was sent. {_ADVICE}"
                )
            time.sleep(_LOOK_EVERY_S)
            space = self._backend.store() or space

    def _unreported(self) -> int:
        since = time.monotonic() - _REPORTED_WITHIN_S
        return sum(nbytes for at, nbytes in [*self._lately] if at >= since)  # other threads may append


class Readonly(Marker):
    """Marker of an argument that is read without a copy; made by :func:`readonly`."""


class StoredValue(Generic[T]):
    """A value that was stored once by :func:`put`; workers get the value in its place."""

    def __init__(self, backend: Backend, ref: Ref, nbytes: int) -> None:
        self._backend = backend
        self.ref = ref
        self.nbytes = nbytes

    @property
    def backend(self) -> str:
        """Name of the backend that stores it."""
        return self._backend.name

    def is_on(self, backend: Backend) -> bool:
        """Return whether calls on a backend can pass the value by reference: not if its cluster was left since."""
        return self._backend is backend

    def get(self) -> T:
        """Return the value, in private memory of the caller.

        Raises:
            PhalanxError: if the value was lost with its node or cluster, or cannot be unpickled.
        """
        try:
            with decoding(meter=session.counts.arrived):
                return self._backend.fetch([self.ref])[0]
        except FetchFailed as error:
            outcome = self._backend.outcome(self.ref)
            why = outcome.lost.reason if outcome.lost else outcome.failure or error.__cause__
            raise PhalanxError(
                f"a px.put value of {self.nbytes} bytes cannot be fetched: {why}. Put the value again"
            ) from error

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a px.put value belongs to its driver; pass it as an argument of a group's method, which gets the value "
            "itself in its place"
        )

    def __repr__(self) -> str:
        return f"<px.put value of {self.nbytes} bytes>"


def put(value: Value, *, readonly: bool = False, backend: str | None = None) -> StoredValue[Any]:
    """Store a value once and use it in any number of calls, on any group of the same backend.

    Args:
        value: anything that can be pickled, without futures and without the markers of arguments.
        readonly: if True, workers read it without a copy; see :func:`readonly`.
        backend: "ray" or "inline"; default as for pools.

    Raises:
        DispatchError: if the value cannot be pickled, or the object store has no capacity for it.
    """
    storing = session.get_backend(backend)
    encoded = encode(value, readonly=readonly)
    quota = StoreQuota(storing)
    quota.admit([encoded.nbytes], "the value given to px.put takes")
    quota.took(encoded.nbytes)
    session.counts.stored_bytes += encoded.nbytes
    return StoredValue(storing, storing.put(encoded), encoded.nbytes)


def readonly(value: T) -> T:
    """Mark an argument of a call so that workers read it in shared memory, without a copy.

    numpy arrays arrive read-only. torch has no read-only tensors: a worker that writes into such a tensor changes it
    for every reader on its node, so only pass values that no worker writes to.
    """
    return Readonly(value)  # type: ignore[return-value]  # the marker stands for the value until it is sent


class StoredPart(NamedTuple):
    """Rows ``start`` to ``stop`` of a stored value, or of a value as encoded bytes; all rows if ``whole``."""

    source: Ref | bytes
    start: int
    stop: int
    whole: bool = True


class StoredParts(ABC):
    """Base class of values in parts, planned like futures: the rows of all parts if ``joined``, else a list.

    ``backend`` is the name of the backend that stores the parts.
    """

    __phalanx_future__: ClassVar[bool] = True
    kinds: ClassVar[set[type]] = set()
    joined: bool
    backend: str

    def __init_subclass__(cls) -> None:
        StoredParts.kinds.add(cls)

    @property
    @abstractmethod
    def parts(self) -> Sequence[StoredPart]:
        """The stored parts, in order."""

    @property
    def __phalanx_rows__(self) -> int:
        """Number of rows, or of items."""
        return sum(part.stop - part.start for part in self.parts) if self.joined else len(self.parts)

    @abstractmethod
    def result(self) -> Value:
        """Fetch the value and return it."""


def shard_between(value: StoredParts, shard: Shard) -> list[StoredPart]:
    """Return the parts of a shard of a value.

    Raises:
        DispatchError: if its number of rows differs from the number of rows of the other arguments.
    """
    start, stop = shard.bounds(value.__phalanx_rows__, "a batch of a channel")
    parts = value.parts
    if not value.joined:
        return list(parts[start:stop])
    counts = [part.stop - part.start for part in parts]
    found: list[StoredPart] = []
    for place, rows in rows_between(counts, start, stop):
        part = parts[place]
        whole = part.whole and len(rows) == counts[place]
        found.append(StoredPart(part.source, part.start + rows.start, part.start + rows.stop, whole))
    # without rows: an empty part, for its dtype and shape
    return found or [part._replace(stop=part.start, whole=False) for part in parts[:1]]
