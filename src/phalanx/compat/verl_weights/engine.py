"""The two ends of an update of weights, with the methods that verl calls on a checkpoint engine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from phalanx.compat.verl_weights.routes import Metadata, Reading, Serving, place, routes
from phalanx.compat.verl_weights.shelf import BoardShelf, start_board
from phalanx.compat.verl_weights.windows import Gathering, Joining, Part, Whole, Window, read_table, unwanted
from phalanx.errors import DeclarationError, WeightsLost
from phalanx.movers.contract import SourceEnd, TargetEnd
from phalanx.movers.ring import RingSource, RingTarget
from phalanx.movers.store import StoreSource, StoreTarget
from phalanx.transfer.buckets import Bucket
from phalanx.transfer.tensors import dtype_named

__all__ = ["WeightsEngine"]

_LEAST_BYTES = 4096


class _Outlet(NamedTuple):
    """One way out of a rank of the actor, and who reads there."""

    end: SourceEnd
    readers: tuple[int, ...]


class _Arrived(NamedTuple):
    parts: Sequence[Part]
    last: bool
    step: int | None
    memory: torch.Tensor


class WeightsEngine:
    """One rank's end: of the actor, which sends, or of the rollout, which receives. Tensors arrive on the CPU.

    verl makes one in each rank, and calls ``prepare``, ``init_process_group``, ``send_weights`` or ``receive_weights``,
    and ``finalize`` in each update. All memory is given back in ``finalize``.

    Args:
        bucket_size: bytes that travel at once; a sender holds two buckets, and so does a receiver.
        is_master: given to ranks of the actor only.
        timeout: seconds that either side waits for the other one with each bucket.
        rollout_dtype: what floating-point tensors travel as, such as "bfloat16"; None: as they are.

    Raises:
        DeclarationError: ``bucket_size`` is below 4096, or ``timeout`` is not positive.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        timeout: float = 600.0,
        rollout_dtype: str | None = None,
    ) -> None:
        if bucket_size < _LEAST_BYTES or timeout <= 0:
            raise DeclarationError(
                f"bucket_size={bucket_size}, timeout={timeout}: checkpoint_engine.backend=phalanx needs at least "
                f"{_LEAST_BYTES} bytes (checkpoint_engine.update_weights_bucket_megabytes) and more than 0 seconds "
                "(checkpoint_engine.engine_kwargs.phalanx.timeout)"
            )
        self._bucket_bytes = bucket_size
        self._sends = is_master is not None
        self._timeout = timeout
        self._dtype = None if rollout_dtype is None else dtype_named(rollout_dtype.removeprefix("torch."))
        self._ring: RingSource | None = None
        self._board: Any = None
        self._outlets: list[_Outlet] = []
        self._serving = Serving(0)
        self._reading: Reading | None = None
        self._inlet: TargetEnd | None = None
        self._whole = Whole()

    def prepare(self) -> Metadata:
        """Begin an update; what is left of another one is given back. Ranks of the actor can be reached from now on."""
        self.finalize()
        if not self._sends:
            return Metadata(place=place(), address="")
        self._ring = RingSource(int(os.environ.get("RANK", "0")), self._bucket_bytes)
        return Metadata(place=place(), address=self._ring.address)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Metadata]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of ``init_process_group`` by rank, of the actor and of the rollout; on the driver."""
        serving, reading = routes(metadata[:actor_wg_world_size], metadata[actor_wg_world_size:])
        return {"route": list(serving)}, {"route": list(reading)}

    def init_process_group(self, route: Serving | Reading) -> None:
        """Make this rank's ends.

        Raises:
            DeclarationError: this rank is of the actor and of the rollout, so that weights need not travel at all.
        """
        if isinstance(route, Serving):
            self._serve(route)
            return
        if self._sends:
            raise DeclarationError(
                "checkpoint_engine.backend=phalanx brings weights to ranks of a rollout of its own, and here a rank of "
                "the actor is to receive them: set checkpoint_engine.backend=naive where both are one process"
            )
        self._reading, self._whole = route, Whole()
        if route.address:
            self._inlet = RingTarget(route.rank, {route.source: route.address}, packing=self._whole)
        else:
            shelf = BoardShelf(route.board, self._timeout, route.rank)
            self._inlet = StoreTarget(shelf, route.rank, self._whole)

    def _serve(self, route: Serving) -> None:
        self._serving = route
        if self._ring is not None and route.near:
            self._outlets.append(_Outlet(self._ring, route.near))
        if route.far:
            self._board = start_board(route.board, route.far)
            self._outlets.append(_Outlet(StoreSource(BoardShelf(route.board, self._timeout)), route.far))

    def finalize(self) -> None:
        """Give everything back. May be called again."""
        ring, inlet = self._ring, self._inlet
        self._ring = self._inlet = self._reading = self._board = None
        self._outlets, self._whole = [], Whole()
        if ring is not None:
            ring.close()
        if inlet is not None:
            inlet.close()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, int]:
        """Send all of ``weights``, pairs of name and tensor, in order.

        Returns when every reader of this node has them, and the store what others read until ``finalize``.

        Tensors are gathered here while those of the window before are sent. A rank that serves nobody only takes part
        in the gathering.

        Raises:
            WeightsLost: a reader died or did not come in time.
        """
        gathering = Gathering(self._bucket_bytes, self._dtype, global_steps)
        sending: asyncio.Future[None] | None = None
        with self._given_back_on_errors():
            async for name, tensor in _each(weights):
                for window in gathering.add(name, tensor) if self._outlets else ():
                    sending = await self._after(sending, window)
            if not self._outlets:
                return {}
            await (await self._after(sending, gathering.finish()))
        return {"sync/tensors": gathering.tensors, "sync/bytes": gathering.nbytes}

    async def _after(self, sending: asyncio.Future[None] | None, window: Window) -> asyncio.Future[None]:
        if sending is not None:
            await sending
        return _begin(self._send, window)

    def _send(self, window: Window) -> None:
        table = window.table()
        for end, readers in self._outlets:
            bucket = window.bucket(self._serving.rank, readers)
            end.send([bucket], window.read, timeout=self._timeout, note=lambda _: table)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Pairs of name and tensor, as they were sent; the next window comes while this one is used.

        Tensors are the receiver's own, and may be kept.

        Raises:
            WeightsLost: the sender died, did not come in time, or sent those of another step.
        """
        joining, number, last = Joining(), 0, False
        with self._given_back_on_errors():
            coming = _begin(self._receive, number)
            while not last:
                parts, last, step, memory = await coming
                _check_step(step, global_steps)
                if not last:
                    number += 1
                    coming = _begin(self._receive, number)
                for name, tensor in joining.tensors(parts, memory):
                    yield name, tensor
            joining.finish()

    def _receive(self, number: int) -> _Arrived:
        inlet, reading = self._inlet, self._reading
        if inlet is None or reading is None:
            raise WeightsLost(
                "receive_weights before init_process_group, or after finalize: begin with prepare"
            )
        source = reading.source
        expected = {source: [Bucket(source, number, 0, (reading.rank,), ())]}
        received = inlet.receive(expected, unwanted, timeout=self._timeout)
        return _Arrived(*read_table(received.notes[source]), self._whole.memory)

    @contextmanager
    def _given_back_on_errors(self) -> Any:
        try:
            yield
        except BaseException:  # a reader that leaves early, too: the other side must hear of it at once
            self.finalize()
            raise


def _begin(work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Begin it now, beside the event loop, which may be busy with collectives until the next await.

    In a thread of its own: one that is left over from an update that failed is in nobody's way, nor in that of the
    process's end.
    """
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work(*args))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="phalanx-weights", daemon=True).start()
    begun = asyncio.wrap_future(done)
    begun.add_done_callback(_seen)
    return begun


def _seen(future: asyncio.Future[Any]) -> None:
    """An error behind which another one was raised is not told a second time."""
    if not future.cancelled():
        future.exception()


def _check_step(sent: int | None, wanted: int | None) -> None:
    if sent is not None and wanted is not None and sent != wanted:
        raise WeightsLost(f"weights of step {sent} came where those of step {wanted} were to come")


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
