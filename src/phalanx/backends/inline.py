"""The inline backend: every rank lives in this process and runs on the calling thread.

Breakpoints, pdb and coverage reach worker code. Arguments and results pass through the codec as in other backends, so
ranks do not share memory by accident. Every rank runs even if an earlier rank raised. While a rank runs, its variables
are set in the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.backends.backend_types import (
    LOST_ARGUMENT,
    Backend,
    Endpoint,
    FetchFailed,
    Lost,
    ProcessStatus,
    RankOutcome,
    RankStream,
    Ref,
    Reservation,
    ReserveRequest,
    ResultHandle,
    SpawnRequest,
    Waited,
    read_file,
)
from phalanx.declare.context import runs_inline
from phalanx.errors import ArgumentLost, CallCancelled, PlacementError
from phalanx.topology.environment import THREADS, variables_set
from phalanx.topology.placement import Holder, NodeCapacity, PlacementTable, Resources, fits_on
from phalanx.topology.slots import Slot, SlotInfo
from phalanx.wire.codec import Encoded
from phalanx.wire.failure import RankFailure, capture, undecodable
from phalanx.wire.messages import OUTPUT, STORE_VARIABLE, Message, RankConfig, StreamEnd
from phalanx.wire.value import Value

_NODE = "inline"


class InlineRef:
    """A stored value, a failure, or a loss. Encoded values are kept as bytes, so each reader decodes its own copy."""

    __slots__ = ("__weakref__", "_encoded", "_value", "failure", "lost", "under_way")

    def __init__(
        self, value: Value = None, failure: RankFailure | None = None, lost: Lost | None = None
    ) -> None:
        self._encoded = isinstance(value, Encoded)
        self._value = pickle.dumps(value, 5) if self._encoded else value
        self.failure = failure
        self.lost = lost
        #: True for the end of a stream until the last item is taken: not ready for ``wait``.
        self.under_way = False

    def get(self) -> Value:
        if self.failure is not None:
            raise self.failure
        if self.lost is not None:
            raise ArgumentLost(LOST_ARGUMENT + self.lost.reason)
        return pickle.loads(self._value) if self._encoded else self._value

    @property
    def is_last(self) -> bool:
        """True if this reference is the last of its stream."""
        return bool(self.failure or self.lost or isinstance(self._value, StreamEnd | RankFailure))


class InlineStream:
    """The stream of a call. The call runs when an item is taken, on the taking thread, until it yields the item.

    ``step(work)`` runs a function as the rank, and returns a reference to its result.
    """

    def __init__(self, items: Iterator[Any], step: Callable[[Callable[[], Any]], InlineRef]) -> None:
        self._items: Iterator[Any] | None = items
        self._step = step
        self._context = copy_context()  # its own context, as other calls run between its steps
        self._begun = False
        self._end: InlineRef | None = None
        self.coming, self.ended = InlineRef(), InlineRef()
        self.ended.under_way = True

    def take(self) -> InlineRef | None:
        items, self._begun = self._items, True
        if items is None:
            end, self._end = self._end, None
            return end
        ref = self._step(lambda: self._context.run(next, items))
        if ref.is_last:
            self._over()
        return ref

    def leave(self) -> None:
        items = self._items
        if items is None:
            return
        self._end = InlineRef(failure=capture(CallCancelled("had not begun it"), kind="cancelled"))
        if self._begun:
            self._end = self._step(lambda: self._context.run(_closed, items))
        self._over()

    def _over(self) -> None:
        items, self._items = self._items, None
        self.ended.under_way = False
        with contextlib.suppress(Exception):  # the outcome is known: a later error has no reader
            self._context.run(_closed, items)

    def __del__(self) -> None:
        if self._items is not None:
            self._over()


def _closed(items: Any) -> StreamEnd:
    items.close()
    return StreamEnd(0)


@dataclass
class InlineServices:
    """Services of the inline backend for a worker runtime in this process."""

    slot: SlotInfo
    files: str
    in_driver = True

    def facts(self) -> tuple[SlotInfo, tuple[str, ...], str]:
        return self.slot, (), self.files

    def call_id(self) -> int:
        return 1

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        return [ref.get() for ref in refs]


@dataclass
class InlineRank:
    """A rank in this process: its worker runtime, and the cause of its loss; None: it lives."""

    runtime: Any
    lost: Lost | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def end(self, lost: Lost) -> None:
        """Mark the rank as lost, so that further calls are refused."""
        self.lost = lost
        if self.runtime is not None:
            self.runtime.lost(lost.exit or lost.reason)


class InlineBackend(Backend):
    """Backend whose ranks are objects in this process."""

    name = "inline"
    immediate = True
    ref_types = (InlineRef,)

    def __init__(self, resources: Resources) -> None:
        self._total = {"CPU": float(os.cpu_count() or 1), **resources}
        self._held: dict[str, tuple[ReserveRequest, list[tuple[str, ...]]]] = {}
        self._numbers = itertools.count()
        self._books = threading.Lock()  # guards _held
        self._lock = threading.RLock()  # a single rank runs at a time, on any calling thread
        self._published: dict[str, bytes] = {}

    def nodes(self) -> list[NodeCapacity]:
        free = Counter(self._total)
        for holder in self.holders():
            free.subtract(holder.resources)
        host = socket.gethostname()
        return [NodeCapacity(node_id=_NODE, host=host, total=dict(self._total), available=dict(free))]

    def holders(self) -> list[Holder]:
        return [
            Holder(request.name, _NODE, {key: n * sum(request.blocks) for key, n in request.bundle.items()})
            for request, _ in list(self._held.values())  # other threads reserve and release
        ]

    def reserve(self, request: ReserveRequest) -> Reservation:
        # CPU and memory are not counted: ranks run one after another in a single process.
        counted = {key: amount for key, amount in request.bundle.items() if key not in ("CPU", "memory")}
        with self._books:
            nodes = self.nodes()
            if not fits_on((node.available for node in nodes), request.blocks, counted):
                verdict = (
                    "does not fit next to the current reservations"
                    if fits_on((node.total for node in nodes), request.blocks, counted)
                    else "can never be placed"
                )
                table = PlacementTable(nodes, request.blocks, counted, self.holders())
                raise PlacementError(f"{request.name}: {verdict} in this process (backend='inline')\n{table}")
            taken = {i for _, block in self._held.values() for ids in block for i in ids}
            free = (str(index) for index in itertools.count() if str(index) not in taken)
            per_slot = int(next((n for key, n in counted.items() if ":" not in key), 0))
            # The backend's object of a block is a list with the accelerator ids of each slot.
            blocks = [[tuple(itertools.islice(free, per_slot)) for _ in range(n)] for n in request.blocks]
            reservation = Reservation(request, blocks, [f"inline-{next(self._numbers)}" for _ in blocks])
            for key, block in zip(reservation.keys, blocks, strict=True):
                self._held[key] = replace(request, blocks=(len(block),), bundle=counted), block
        return reservation

    def release(self, keys: Sequence[str]) -> None:
        with self._books:
            for key in keys:
                self._held.pop(key, None)

    def nodes_of(self, slots: Sequence[Slot], reservations: Mapping[str, Reservation]) -> list[str]:
        return [_NODE] * len(slots)

    def probe(
        self, slots: Sequence[Slot], reservations: Mapping[str, Reservation], bundle: Resources
    ) -> list[tuple[str, ...]]:
        return [reservations[slot.pool].ids[slot.block][slot.bundle] for slot in slots]

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        endpoints: list[Endpoint] = []
        for index, slot in enumerate(request.slots):
            ids = request.reservations[slot.pool].ids[slot.block][slot.bundle]
            facts = SlotInfo(
                node_id=_NODE,
                host=socket.gethostname(),
                node_ip="127.0.0.1",
                accelerator_ids=ids,
                cpus_of_node=os.cpu_count(),
                threads=os.environ.get(THREADS) or None,
            )
            runtime = request.factory(InlineServices(facts, self._folder))
            name = request.names[index] if request.names else None
            endpoints.append(Endpoint(slot, InlineRank(runtime), runtime.report(), name))
        return endpoints

    @functools.cached_property
    def _folder(self) -> str:
        """The folder for the files of all ranks, created on first use and removed when this process exits."""
        folder = tempfile.mkdtemp(prefix="phalanx-inline-")
        atexit.register(_remove, folder, os.getpid())
        return folder

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> ResultHandle:
        setup, _ = RankConfig.unpack(data)
        endpoint.handle.environment = {**setup.environment, STORE_VARIABLE: "inline"}
        return ResultHandle(self._run(endpoint, lambda runtime: runtime.setup(data, refs)))

    def submit(self, endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> ResultHandle:
        ref = self._run(endpoint, lambda runtime: runtime.run(message))
        if returns == OUTPUT or ref.failure is not None or ref.lost is not None:
            return ResultHandle(*[ref] * returns)
        info, output = map(InlineRef, ref.get())
        return ResultHandle(output, info)

    def _run(self, endpoint: Endpoint, work: Callable[[Any], Any]) -> InlineRef:
        """Call ``work`` with the rank's worker runtime and return a reference to its outcome."""
        rank: InlineRank = endpoint.handle
        # A rank that calls other ranks, perhaps from its own thread, runs inside a call that holds the lock already.
        with contextlib.nullcontext() if runs_inline() else self._lock:
            runtime = rank.runtime  # before the check: another thread may end the rank
            if rank.lost is not None:
                return InlineRef(lost=rank.lost)
            try:
                with variables_set(rank.environment):
                    return InlineRef(work(runtime))
            except RankFailure as failure:
                return InlineRef(failure=failure)
            except SystemExit as left:
                rank.end(Lost(f"the worker called sys.exit({left.code!r})", f"exit code {left.code}"))
                return InlineRef(lost=rank.lost)
            except Exception as error:  # of this library: the worker runtime catches errors of user code
                return InlineRef(failure=capture(error))

    def call_id(self, ref: Ref) -> int:
        return 1  # a call has ended when its submission returns

    def stream(self, endpoint: Endpoint, message: Message, buffer: int | None) -> RankStream:
        """Start a stream. The rank makes each item when the item is taken, whatever ``buffer`` is."""
        runtime = endpoint.handle.runtime
        items = iter(()) if runtime is None else runtime.stream(message)
        return InlineStream(items, lambda work: self._run(endpoint, lambda _: work()))

    def put(self, value: Value) -> Ref:
        return InlineRef(value)

    def address_of(self, ref: Ref) -> Any:
        return ref

    def at(self, address: Any) -> Ref:
        return address

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        try:
            return [ref.get() for ref in refs]
        except Exception as error:  # RankFailure, the loss of the rank, or an error of unpickling
            raise FetchFailed from error

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> Waited:
        ended = [index for index, ref in enumerate(refs) if not ref.under_way]
        return ended, [index for index in range(len(refs)) if index not in ended]

    def outcome(self, ref: Ref) -> RankOutcome:
        if ref.failure is not None or ref.lost is not None:
            return RankOutcome(failure=ref.failure, lost=ref.lost)
        try:
            return RankOutcome(ref.get())
        except Exception as error:
            return RankOutcome(failure=undecodable(error))

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [position for position, endpoint in enumerate(endpoints) if endpoint.handle.lost]

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        for endpoint in endpoints:
            rank: InlineRank = endpoint.handle
            rank.end(Lost("the rank was stopped", "stopped", intended=True))
            rank.runtime = None
        return ()

    def inspect(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[ProcessStatus]:
        lost = [one.handle.lost is not None for one in endpoints]
        return [ProcessStatus(reachable=not gone, gone=gone) for gone in lost]

    def cancel(self, endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        return [False] * len(endpoints)  # a call has ended when its submission returns

    def signal(self, endpoints: Sequence[Endpoint], signum: int) -> None:
        """End the ranks if the signal is SIGKILL, SIGTERM, SIGABRT or SIGSEGV; ignore other signals."""
        if signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV):
            lost = Lost("the rank was ended by an injected signal", f"signal {signal.Signals(signum).name}")
            for endpoint in endpoints:
                endpoint.handle.end(lost)

    def read(self, endpoint: Endpoint, path: str, offset: int, limit: int) -> bytes:
        return read_file(path, offset, limit)

    def start_service(self, start: Callable[[str], Any]) -> tuple[Any, Any]:
        """Call ``start`` in this process. Return None as the handle, and the result."""
        return None, start("127.0.0.1")

    def publish(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._published.pop(key, None)
        else:
            self._published[key] = value

    def published(self, key: str) -> bytes | None:
        return self._published.get(key)

    def post_mortem(self, endpoint: Endpoint, lost: Lost | None) -> Lost:
        return lost or endpoint.handle.lost or Lost("the rank was stopped", "stopped")


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
