"""Flow control: a call waits until the object store has capacity for its values before any of it is sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from phalanx.backends.backend_types import Backend
from phalanx.display.byte_format import size
from phalanx.errors import DispatchError

_UNCHECKED = 32 << 20
_REMEMBERED = 1024
_REPORTED_WITHIN_S = 0.3  # the backend's statistics may lack values that were stored more recently
_LOOK_EVERY_S = 0.05
_FREED_WITHIN_S = 2.0  # the statistics may still count values that were dropped more recently


class StoreQuota:
    """Admits a call once the object store of this node has capacity for its values.

    Without flow control, a full store spills to disk, which is slower than the copies by an order of magnitude, and
    finally processes are killed for lack of memory. A call that does not fit next to the calls in flight waits for
    them; a call that does not fit at all fails.
    """

    unchecked = _UNCHECKED  # bytes; smaller requests are not checked

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lately: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)

    def took(self, nbytes: int) -> None:
        """Note that a value of ``nbytes`` bytes was stored."""
        if nbytes >= self.unchecked // 32:
            self._lately.append((time.monotonic(), nbytes))

    def admit(
        self,
        nbytes: int,
        largest: int,
        what: str = "the arguments of this call take",
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """Wait until the store has capacity for ``nbytes``, of which the largest value takes ``largest``.

        Args:
            nbytes: bytes of all values.
            largest: bytes of the largest value.
            what: subject of the error message.
            wait: waits up to the given seconds for a call to end; returns whether any call is in flight.

        Raises:
            DispatchError: if the values do not fit, and no call is in flight whose end would free capacity.
        """
        if nbytes < self.unchecked:
            return
        space = self._backend.store()
        if space is None:
            return
        if nbytes > space.capacity:
            raise DispatchError(
                f"{what} {size(nbytes)} in the object store (the largest value {size(largest)}), which holds "
                f"{size(space.capacity)} on this node. Nothing was sent. {_ADVICE}"
            )
        until = time.monotonic() + _FREED_WITHIN_S
        while space.free - self._unreported() < nbytes:
            if wait is not None and wait(_LOOK_EVERY_S):
                until = time.monotonic() + _FREED_WITHIN_S
            elif time.monotonic() > until:
                raise DispatchError(
                    f"{what} {size(nbytes)} in the object store, of which {size(max(0, space.free))} of "
                    f"{size(space.capacity)} are free on this node, and no call in flight would free more. "
                    f"Nothing was sent. {_ADVICE}"
                )
            else:
                time.sleep(_LOOK_EVERY_S)
            space = self._backend.store() or space

    def _unreported(self) -> int:
        since = time.monotonic() - _REPORTED_WITHIN_S
        return sum(nbytes for at, nbytes in [*self._lately] if at >= since)  # other threads may append


_ADVICE = (
    "Send fewer rows per call, drop px.put values and futures that are done with, or give the store more: "
    "px.init(object_store_memory=<bytes>)"
)
