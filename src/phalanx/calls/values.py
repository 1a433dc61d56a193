"""Values that are stored once, and values that are only read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import FetchFailed, Ref
from phalanx.calls.counts import process
from phalanx.calls.store_quota import Room
from phalanx.errors import DeclarationError, PhalanxError
from phalanx.session.session import session
from phalanx.wire.codec import Policy, decoding, encode
from phalanx.wire.value import Reduced, Value

T = TypeVar("T")


@dataclass(frozen=True)
class Readonly(Generic[T]):
    """Marks a value of a call to be read without a copy; made by :func:`readonly`."""

    value: T


class StoredValue(Generic[T]):
    """A value that was stored once by :func:`put`; workers get the value in its place."""

    def __init__(self, backend: Backend, ref: Ref, nbytes: int) -> None:
        self._backend = backend
        self._ref = ref
        self.nbytes = nbytes

    @property
    def ref(self) -> Ref:
        """The backend's reference."""
        return self._ref

    @property
    def backend(self) -> str:
        """Name of the backend that stores it."""
        return self._backend.name

    def get(self) -> T:
        """The value, in private memory of the caller.

        Raises:
            PhalanxError: it was lost with the node or cluster that stored it, or cannot be unpickled.
        """
        try:
            with decoding(meter=process.arrived):
                return self._backend.fetch([self._ref])[0]
        except FetchFailed as error:
            outcome = self._backend.outcome(self._ref)
            why = outcome.lost.reason if outcome.lost else str(outcome.failure)
            raise PhalanxError(
                f"a px.put value of {self.nbytes} bytes cannot be had: {why}. Put the value again"
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
        value: anything that could be an argument of a call.
        readonly: workers read it without a copy; see :func:`readonly`.
        backend: "ray" or "inline"; default as for pools.

    Raises:
        DispatchError: the value cannot be pickled, or the object store has no room for it.
    """
    storing = session.get_backend(backend)
    encoded = encode(value, policy=Policy.READONLY if readonly else None)
    Room(storing).admit(encoded.nbytes, encoded.nbytes, "the value given to px.put takes")
    process.stored_bytes += encoded.nbytes
    return StoredValue(storing, storing.put(encoded), encoded.nbytes)


def readonly(value: T) -> T:
    """Pass ``value`` to a call so that workers read it in shared memory, without a copy.

    numpy arrays arrive read-only. torch has no read-only tensors: a worker that writes into such a tensor changes it
    for every reader on its node, so only pass values that no worker writes to.
    """
    return Readonly(value)  # type: ignore[return-value]  # the marker stands for the value until it is sent
