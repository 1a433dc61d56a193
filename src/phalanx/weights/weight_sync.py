"""``px.WeightSync``: sync weights from a source role to target roles."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

from phalanx.calls.call import Call
from phalanx.calls.call_state import raisable
from phalanx.calls.future import CallFuture, gather
from phalanx.channels.staleness import StalenessManager
from phalanx.display.tables import Table
from phalanx.errors import (
    CallCancelled,
    CallTimeout,
    DeclarationError,
    GroupBroken,
    GroupClosed,
    GroupError,
    PhalanxError,
    RemoteCallError,
    WeightsError,
    WeightsTransferError,
    WeightsVerificationError,
    WorkerDiedError,
)
from phalanx.group.group import Group
from phalanx.group.roster import key_of
from phalanx.members.recovery import ensure_ready
from phalanx.session.wait_threads import Pending
from phalanx.weights import weight_handlers
from phalanx.weights.digests import Verify
from phalanx.weights.name_matching import Fused, Rename, renamer
from phalanx.weights.sync_pairs import Ranks, SyncPair, SyncSide, connect_pair, side_of
from phalanx.weights.transport_interface import Sent, SyncRequest
from phalanx.weights.transports import TRANSPORTS
from phalanx.weights.versions import Weights, WeightsVersion
from phalanx.wire.messages import WeightsKey
from phalanx.wire.value import Reduced, checked_choice, checked_number, checked_timeout

_TIMEOUT_S = 600.0
_GRACE_S = 5.0
_GRACE_AFTER_DEATH_S = 0.5
_PRECEDENCE = (
    (CallCancelled, 0),
    (WorkerDiedError, 1),
    (WeightsVerificationError, 2),
    (WeightsTransferError, 4),
    (RemoteCallError, 3),
    (GroupError, 5),
)
"""Kinds of errors and their precedence; errors with higher numbers more likely follow from others. The default is 3."""
_Pairs = dict[SyncSide, SyncPair]


class WeightSync:
    """Sync weights from a source role to target roles: ``version = sync()``.

    The two sides may be sharded differently. Each target rank receives only the boxes that it needs, and digests are
    verified. The first sync plans and connects the ranks, and so does the next sync after a change of processes.

    Args:
        source: group or role whose workers called ``publish_weights``.
        target: group or role whose workers called ``accept_weights``, or several of them.
        name: name of the weights on the target's side, and on the source's unless ``source_name`` is given.
        source_name: name of the weights on the source's side.
        rename: map from tensor names of the source to names of the target: a mapping, in whose names ``*`` stands for
            any text, or a function.
        fused: ``px.weights.Fused`` rules in addition to the built-in rules (``qkv_proj``, ``gate_up_proj``). Rules
            for Megatron are ``px.weights.Fused.megatron_qkv(...)`` and ``px.weights.Fused.megatron_glu()``.
        verify: "sampled" compares digests of about an element per 32 KB, "full" of every bit, "off" of nothing.
        expect_change: True warns at the first sync that changed nothing, False at the second in a row.
        transport: "auto" chooses by the locations of the ranks: shared memory or CUDA IPC on a node, NCCL (device
            tensors) or gloo between nodes. "shared memory", "cuda ipc", "nccl" and "gloo" override the choice for
            ranks of different processes; "shared memory" and "cuda ipc" only on a node.
        delta: True sends only the elements whose bits changed since the last version, for tensors in host memory. A
            target without the last version receives everything. The sources keep another copy of the tensors that
            they send; see :meth:`explain`.
        staleness: manager that advances to each version once the targets have it. Its versions then have the numbers of
            the weights. Up to ``rows_per_version`` rows count as trained per version, none if the source's ``step`` is
            the same.
        bucket_bytes: size of the buckets in which weights are sent. Between ranks of a node they have at most 16 MB
            in host memory and 64 MB in device memory, and each source keeps two of them.
        timeout: seconds that a rank waits for its peers during a sync; None: 600.

    Raises:
        DeclarationError: if an argument is invalid.
    """

    #: Pairs whose ``px.WeightSync`` was garbage-collected. A finalizer may run anywhere, so it makes no calls.
    _dropped: ClassVar[deque[_Pairs]] = deque()

    def __init__(
        self,
        source: Ranks,
        target: Ranks | Sequence[Ranks],
        name: str,
        *,
        source_name: str | None = None,
        rename: Rename | None = None,
        fused: Sequence[Fused] = (),
        verify: Verify = "sampled",
        expect_change: bool = False,
        transport: Literal["auto", "shared memory", "cuda ipc", "nccl", "gloo"] = "auto",
        delta: bool = False,
        staleness: StalenessManager | None = None,
        bucket_bytes: int = 256 << 20,
        timeout: float | None = None,
    ) -> None:
        checked_choice("px.WeightSync: transport", transport, TRANSPORTS)
        advice = "give at least 4096 bytes, better 256 MB"
        bucket_size = checked_number("px.WeightSync: bucket_bytes", bucket_bytes, 4096, advice)
        renamer(rename)  # raises here, at the line of the user
        targets: list[Ranks] = [*target] if isinstance(target, Sequence) else [target]
        if not targets:
            raise DeclarationError("px.WeightSync(target=[]): give at least one group to sync to")
        self.name = name
        self._source = side_of(source, "source", source_name or name)
        self._targets = [side_of(ranks, "target", name) for ranks in targets]
        self._verify: Verify = checked_choice("px.WeightSync: verify", verify, get_args(Verify))
        self._expect_change = expect_change
        self._timeout = checked_timeout(timeout, "px.WeightSync", DeclarationError) or _TIMEOUT_S
        self._connect = functools.partial(
            connect_pair, self._source, rename, tuple(fused), bucket_size, transport, delta
        )
        self._pairs: _Pairs = {}
        weakref.finalize(self, self._dropped.append, self._pairs).atexit = False
        self._lock = threading.RLock()
        self._running: SyncFuture | None = None
        self._newest = 0
        self._sent_from: frozenset[tuple[int, float]] = frozenset()
        self._unchanged_syncs = 0
        self._staleness = staleness
        self._trained_step: int | None = None
        self._closed = False
        for side in self._targets:
            side.core.syncs.add(self)

    def __call__(
        self, *, step: int | None = None, expect_change: bool | None = None, verify: Verify | None = None
    ) -> WeightsVersion:
        """Sync, and wait until the targets have the version.

        Args:
            step: reject weights of another count of optimizer steps.
            expect_change, verify: override the options of the sync for this call.

        Raises:
            WeightsMismatch: if the two sides do not fit. Nothing was moved.
            PhalanxError: as ``CallFuture.result``. If a rank died or raised, the target's weights may be torn.
        """
        return self.submit(step=step, expect_change=expect_change, verify=verify).result()

    def submit(
        self, *, step: int | None = None, expect_change: bool | None = None, verify: Verify | None = None
    ) -> CallFuture[WeightsVersion]:
        """Begin a sync and return the future of its version. Each group runs later calls after its part of the sync."""
        self._recover(self._source, *self._targets)
        return self._begin(step, self._expect_change if expect_change is None else expect_change, verify)

    def _begin(
        self,
        step: int | None = None,
        expect_change: bool = False,
        verify: Verify | None = None,
        resynced: Group | None = None,
    ) -> SyncFuture:
        """Send the calls of a sync. Only the targets of ``resynced`` take part, if it is given."""
        with self._lock:
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    _close_pairs(self._dropped.popleft())
            if self._running and self._running.done():
                self._running.exception()  # if it failed, its connections are closed
            wanted: Verify = checked_choice("px.WeightSync: verify", verify or self._verify, get_args(Verify))
            request = SyncRequest("", 0, wanted, self._timeout, step)
            targets = [side for side in self._targets if resynced in (None, side.core)]
            while True:
                pairs = self._connected(targets)
                # All threads take the locks in the same order, so that they never wait for each other in a cycle.
                cores = {side.core for pair in pairs for side in (pair.source, pair.target)}
                with contextlib.ExitStack() as stack:
                    for core in sorted(cores, key=lambda core: (core.name, id(core))):
                        stack.enter_context(core.send_lock)
                    if all(pair.is_current for pair in pairs):
                        request = request._replace(number=self._next_number(pairs))
                        began, is_resync = time.monotonic(), resynced is not None
                        sent = self._send(pairs, request)
                        self._running = SyncFuture(
                            self, sent, request.number, began, expect_change, is_resync
                        )
                        return self._running

    def _connected(self, targets: Sequence[SyncSide]) -> list[SyncPair]:
        """Return a connected pair for each target. The caller has to check again that they are current.

        Raises:
            DeclarationError: if the sync was closed.
            GroupClosed, GroupBroken, WorkerDiedError: if a group takes no calls.
        """
        if self._closed:
            raise DeclarationError(f"this sync of weights {self.name!r} was closed; create another")
        try:
            for side in (self._source, *targets):
                side.core.check()
        except GroupError:  # the connections cannot be used any more
            _close_pairs(self._pairs)
            raise
        for target in targets:
            pair = self._pairs.get(target)
            if pair is not None and not pair.is_current:
                self._pairs.pop(target).close()
            if target not in self._pairs:
                self._pairs[target] = self._connect(target)
        return [self._pairs[target] for target in targets]

    def _send(self, pairs: Sequence[SyncPair], request: SyncRequest) -> dict[SyncPair, list[Call]]:
        """Send the calls of all pairs."""
        if self._staleness is not None:
            self._staleness._request("expect", request.number)
        sent: dict[SyncPair, list[Call]] = {pair: [] for pair in pairs}
        try:
            for pair, calls in sent.items():
                # before the outcome: the caller may restart the group without asking for it
                pair.target.core.had_weights.setdefault(pair.target.key, request.number)
                calls.extend(pair.send(request))
        except BaseException:
            for call in itertools.chain(*sent.values()):
                with contextlib.suppress(PhalanxError):  # the group was closed, and with it the call
                    call.cancel()
            _close_pairs(self._pairs)  # a cancelled rank has closed its endpoints
            raise
        return sent

    def _next_number(self, pairs: Sequence[SyncPair]) -> int:
        """Return a number greater than every number that a rank or the staleness manager knows.

        The number of a failed sync is used again if no rank had begun with it: ranks report the newest version that
        they know when they are connected.
        """
        published = self._source.core.published_weights
        training = 0 if self._staleness is None else self._staleness.version  # may be of an earlier run
        newest = (published.get(self._source.key, 0), training, *(pair.newest for pair in pairs))
        self._newest = max(newest) + 1
        published[self._source.key] = self._newest
        self._sent_from = self._processes()
        return self._newest

    def _processes(self) -> frozenset[tuple[int, float]]:
        """Return the processes of the source."""
        return frozenset(key_of(one.facts) for one in self._source.core.endpoints)

    def _note_outcome(self, future: SyncFuture, outcome: WeightsVersion | BaseException) -> None:
        """Note the end of a sync in the groups, and warn if the source does not seem to train."""
        number, pairs, future.sent = future.number, list(future.sent), {}
        source, staleness, targets = self._source, self._staleness, [pair.target for pair in pairs]
        if not isinstance(outcome, WeightsVersion):
            for target in targets:
                target.notify(target.ranks, weight_handlers.tear, target.key, number)
            # pairs that were connected since, for a later sync, stay open
            if all(self._pairs.get(pair.target) is pair for pair in pairs):
                for target in targets:
                    target.core.note_weights(*target.key, f"failed({number})")
                _close_pairs(self._pairs)
                published = source.core.published_weights
                if published.get(source.key) == number:  # no rank has this version
                    published[source.key] = number - 1
            return
        if staleness is not None and number > staleness.version:  # not if the next sync was awaited first
            self._advance(staleness, outcome, is_resync=future.is_resync)
        source.core.note_weights(*source.key, f"published({number})")
        for target in targets:
            had = target.core.had_weights
            had[target.key] = max(number, had.get(target.key, 0))
            target.core.note_weights(*target.key, f"complete({number})")
        if not future.is_resync:  # a resync says nothing about the trainer
            self._warn_if_unchanged(outcome, expect_change=future.expect_change)

    def _advance(self, staleness: StalenessManager, version: WeightsVersion, *, is_resync: bool) -> None:
        """Advance the staleness manager to a version that the targets have, from which the trainer continues."""
        stats = staleness.stats
        # The first version after a resume only restores weights: nothing was trained for it in this process.
        is_same = is_resync if version.step is None else version.step == self._trained_step
        trained = 0 if is_same or stats.restored else min(staleness.rows_per_version, stats.rows.ready)
        self._trained_step = version.step
        staleness.advance(version.number, trained=trained)

    def _warn_if_unchanged(self, version: WeightsVersion, *, expect_change: bool) -> None:
        """Warn at the second sync in a row that changed nothing or, with ``expect_change``, at each."""
        self._unchanged_syncs = count = 0 if version.changed else self._unchanged_syncs + 1
        if count == 2 or (expect_change and count):
            times = "the sync" if count == 1 else f"{count} syncs in a row"
            text = (
                f"weights {self.name!r}, version {version.number}: {times} changed nothing: the source publishes the "
                "same weights again; check that it trains them"
            )
            warnings.warn(text, RuntimeWarning, _user_stack_level())

    def newest(self, key: WeightsKey) -> int | None:
        """Return the number of the last sync to weights of a role and name; 0: none yet; None: not a target.

        This and the next three methods implement :class:`phalanx.group.group.Resync`.
        """
        is_target = not self._closed and any(side.key == key for side in self._targets)
        return self._newest if is_target else None

    def doubt(self) -> str:
        """Return the reason why the source may not have the weights of the last sync any more; "" if it has."""
        core = self._source.core
        if core.closed:
            return f"their source {core.name!r} is closed"
        if not self._newest:
            return f"this px.WeightSync from {core.name!r} has sent none yet"
        if self._sent_from.isdisjoint(self._processes()):
            return f"all ranks of their source {core.name!r} were restarted after the last sync"
        return ""

    def mend_source(self) -> None:
        """Recover the source, if it is broken and its policy allows it."""
        self._recover(self._source)

    def bring(self, to: Group) -> None:
        """Sync the source's weights to all ranks of a target group that has new ranks."""
        with self._lock:
            if self._running:
                self._running.exception()  # the loss of a rank has ended it, or will
            self._begin(resynced=to).result()

    @staticmethod
    def _recover(*sides: SyncSide) -> None:
        """Recover broken groups, if their policies allow it.

        The caller must not hold the lock of the sync: a thread that recovers a target needs it to resync new ranks.
        """
        for side in sides:
            with contextlib.suppress(GroupBroken, GroupClosed):  # the sync itself raises these
                ensure_ready(side.core)

    def explain(self) -> Table:
        """Return a table of the bytes that a sync moves by rank, locality and transport; casts, renames and ties.

        The groups are connected, as by the first sync.

        Raises:
            DeclarationError: if the sync was closed.
            PhalanxError: as :meth:`__call__`.
        """
        self._recover(self._source, *self._targets)
        with self._lock:
            tables = [pair.explain() for pair in self._connected(self._targets)]
        if len(tables) == 1:
            return tables[0]
        rows = tuple(row for table in tables for row in table.rows)
        notes = tuple(note for table in tables for note in (table.title, *table.notes))
        return Table(f"weights {self.name!r} to {len(tables)} groups", tables[0].columns, rows, notes)

    def close(self) -> None:
        """Release memory, connections and process groups on the ranks. May be called again."""
        with self._lock:
            self._closed = True
            _close_pairs(self._pairs)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_pairs(pairs: _Pairs) -> None:
    while pairs:
        pairs.popitem()[1].close()


class SyncFuture(CallFuture[WeightsVersion]):
    """A running sync: ``result()`` returns its :class:`WeightsVersion`.

    Args:
        sync: the sync, which notes the outcome once.
        sent: the calls of each pair.
        number: the version.
        began: start of the sync on the monotonic clock.
        expect_change: True warns if nothing changed.
        is_resync: True if the sync is for new ranks of a target, and says nothing about the trainer.
    """

    __phalanx_future__ = False  # the value is made on the driver

    def __init__(
        self,
        sync: WeightSync,
        sent: Mapping[SyncPair, Sequence[Call]],
        number: int,
        began: float,
        expect_change: bool,
        is_resync: bool,
    ) -> None:
        self.calls = [call for calls in sent.values() for call in calls]
        super().__init__(self.calls[-1])
        self._sync, self._began = sync, began
        self.sent, self.number = sent, number
        self.expect_change, self.is_resync = expect_change, is_resync
        self._outcome: WeightsVersion | BaseException | None = None

    @property
    def _is_over(self) -> bool:
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> WeightsVersion:
        """Wait for the sync and return the version that arrived.

        Args:
            timeout: maximum seconds to wait. The sync continues afterwards.

        Raises:
            WorkerDiedError: if a rank of a side died. The weights of the targets are torn.
            RemoteCallError: if a rank raised. It is also an instance of ``WeightsVerificationError`` (tensors differ
                from the source's), ``WeightsTransferError`` (a peer was late or lost), ``WeightsError`` (the source's
                weights were written to, or are of another step), or of an exception of the user's code.
            CallTimeout: if the sync is not over after ``timeout``.
        """
        if self._outcome is None:
            outcome = self._find_outcome(timeout)
            with self._sync._lock:
                if self._outcome is None:
                    self._outcome = outcome
                    self._sync._note_outcome(self, outcome)
        if not isinstance(self._outcome, WeightsVersion):
            raise raisable(self._outcome)
        return self._outcome

    def _find_outcome(self, timeout: float | None) -> WeightsVersion | BaseException:
        seconds = None if timeout is None else max(0.0, timeout)
        try:
            gather(*(CallFuture(call) for call in self.calls if not call.over), timeout=seconds)
            return self._version()
        except Exception as error:
            if isinstance(error, CallTimeout) and not all(call.over for call in self.calls):
                raise
            return self._cause(error).with_traceback(None)

    def _version(self) -> WeightsVersion:
        changed, steps, wire_bytes = 0, list[int](), 0
        for calls in self.sent.values():
            answers: list[Sent | None] = [answer for call in calls for answer in call.result(None)]
            sources = [sent for sent in answers if sent is not None]
            wire_bytes += sum(sent.nbytes for sent in sources)
            steps += [sent.step for sent in sources if sent.step is not None]
            # a tensor changed if some source has other values than the last time
            marks = zip(*(sent.changed for sent in sources), strict=True)
            changed = max(changed, sum(map(any, marks)))
        nbytes, seconds = sum(pair.nbytes for pair in self.sent), time.monotonic() - self._began
        return WeightsVersion(self.number, seconds, nbytes, changed, max(steps, default=None), wire_bytes)

    def _cause(self, error: BaseException) -> BaseException:
        """Return the error from which the others followed."""
        errors: list[BaseException] = []
        grace = _GRACE_AFTER_DEATH_S if isinstance(error, WorkerDiedError) else _GRACE_S
        for call in self.calls:
            try:
                call.result(grace)
            except Exception as other:
                errors.append(other)
                if not call.over:
                    call.cancel()  # it may wait long for ranks that will not come
        # the first of equal errors, the source's: a target that waits for it may be late because of another target
        cause = min([*errors, error], key=_precedence)
        if isinstance(cause, PhalanxError):
            cause = raisable(cause)
            sync, source = self._sync.name, self._sync._source.title
            text = f"in the sync of weights {sync!r} from {source!r} to version {self.number}"
            cause.__dict__["__notes__"] = [*getattr(cause, "__notes__", ()), text]
        return cause

    def cancel(self) -> bool:
        """End the sync on every rank; see ``CallFuture.cancel``. Weights that were being written are torn then."""
        ended = [call.cancel() for call in self.calls]  # a list: every call is cancelled
        return any(ended)

    def cancelled(self) -> bool:
        """Return whether the sync was cancelled."""
        return any(call.cancelled for call in self.calls)

    def done(self) -> bool:
        """Return whether every rank has returned, raised or died, without waiting."""
        return all(call.all_ended() for call in self.calls)

    def pending(self, deadline: float | None = None) -> Pending:
        """Return the references to wait for until the sync has ended."""
        refs = [ref for call in self.calls for ref in call.arrivals.awaited()]
        return Pending(self.call.core.backend, refs, deadline)

    def __reduce__(self) -> Reduced:
        raise DeclarationError("the future of a sync cannot be an argument of a call; pass its result()")


def _precedence(error: BaseException) -> int:
    """Return a number that is lower the more likely the error caused the others."""
    return next((place for kind, place in _PRECEDENCE if isinstance(error, kind)), 3)


def status(group: Ranks, name: str, *, timeout: float | None = None) -> dict[int, Weights]:
    """Return the state of the weights that a role accepts under ``name``, by rank.

    ``str()`` of each is "none" (of no version), "complete(3)" or "torn(3)". Ranks respond after the calls that were
    sent before. Ranks whose process died are left out.

    Args:
        group: a group, a role of a group, or some of its ranks.
        name: name of the weights.
        timeout: seconds to wait for busy ranks; None waits without a limit.

    Raises:
        DeclarationError: if the role accepts no weights of that name.
        WeightsError: if a living rank did not respond in time.
    """
    side = side_of(group, "target", name)
    title = f"px.weights.status({side.title!r}, {name!r})"
    answers = side.ask(side.ranks, title, weight_handlers.state, side.key).answers(timeout)
    for rank, answer in answers.items():
        if isinstance(answer, DeclarationError):
            raise DeclarationError(f"{title}: {answer}")
        if isinstance(answer, Exception):
            raise WeightsError(f"{title}: rank {rank} did not respond: {answer}") from answer
    return answers


def _user_stack_level() -> int:
    """Return the number of frames from the caller to the first frame outside the library, for a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("phalanx."):
        level, frame = level + 1, frame.f_back
    return level
