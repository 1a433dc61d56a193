"""``px.WeightSync``: sync weights from a source role to target roles."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.run_on import run_on
from phalanx.calls.timeouts import checked
from phalanx.channels.staleness import StalenessManager
from phalanx.display.tables import Table
from phalanx.errors import (
    DeclarationError,
    GroupBroken,
    GroupClosed,
    GroupError,
    PhalanxError,
    WeightsError,
)
from phalanx.group.group import Group
from phalanx.group.roster import key_of
from phalanx.members.recovery import ensure_ready
from phalanx.weights import weight_handlers
from phalanx.weights.digests import Verify
from phalanx.weights.name_matching import Fused, Rename, renamer
from phalanx.weights.sync_future import SyncFuture
from phalanx.weights.sync_pairs import (
    PairOptions,
    Ranks,
    SyncPair,
    SyncSide,
    connect_pair,
    hold_order,
    side_of,
)
from phalanx.weights.transport_interface import TRANSPORTS
from phalanx.weights.versions import Key, Weights, WeightsVersion
from phalanx.weights.weight_requests import SyncRequest

_TIMEOUT_S = 600.0
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
        verify: "sampled" compares digests of an element of about each 8 KB, "full" of every bit, "off" of nothing.
        expect_change: True warns at the first sync that changed nothing, False at the second in a row.
        transport: "auto" chooses by the locations of the ranks: shared memory or CUDA IPC on a node, NCCL (device
            tensors) or gloo between nodes. "shared memory", "cuda ipc", "nccl" and "gloo" override the choice for
            ranks of different processes; "shared memory" and "cuda ipc" only on a node.
        delta: True sends only the elements whose bits changed since the last version, for tensors in host memory. A
            target without the last version receives everything. The sources keep another copy of the tensors that
            they send; see :meth:`explain`.
        staleness: manager that gets each version once the targets have it. Its versions then have the numbers of
            the weights. Up to ``rows_per_version`` rows count as trained per version, none if the source's ``step`` is
            the same.
        bucket_bytes: size of the buckets in which weights are sent. Between ranks of a node they have at most 16 MB,
            and each source keeps two of them in memory.
        timeout: seconds that a rank waits for its peers during a sync.

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
        if transport not in TRANSPORTS:
            expected = ", ".join(map(repr, TRANSPORTS))
            raise DeclarationError(f"px.WeightSync(transport={transport!r}): expected one of {expected}")
        if bucket_bytes < 4096:
            raise DeclarationError(
                f"px.WeightSync(bucket_bytes={bucket_bytes}): give at least 4096 bytes, better 256 MB"
            )
        renamer(rename)  # raises here, at the line of the user
        targets: list[Ranks] = [*target] if isinstance(target, Sequence) else [target]
        if not targets:
            raise DeclarationError("px.WeightSync(target=[]): give at least one group to sync to")
        self.name = name
        self._source = side_of(source, "source", source_name or name)
        self._targets = [side_of(ranks, "target", name) for ranks in targets]
        self._verify: Verify = _checked_verify(verify)
        self._expect_change = expect_change
        self._timeout = checked(timeout, "px.WeightSync") or _TIMEOUT_S
        self._options = PairOptions(rename, tuple(fused), bucket_bytes, transport, delta)
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
            expect_change, verify: override the options of the sync for this time.

        Raises:
            WeightsMismatch: if the two sides do not fit. Nothing was moved.
            PhalanxError: see ``CallFuture.result``. If a rank died or raised, the target's weights may be torn.
        """
        return self.submit(step=step, expect_change=expect_change, verify=verify).result()

    def submit(
        self, *, step: int | None = None, expect_change: bool | None = None, verify: Verify | None = None
    ) -> CallFuture[WeightsVersion]:
        """Begin a sync and return the future of its version. Each group continues with later calls after its part."""
        for side in (self._source, *self._targets):
            _recover(side)
        return self._begin(step, expect_change, verify)

    def _begin(
        self,
        step: int | None = None,
        expect_change: bool | None = None,
        verify: Verify | None = None,
        resynced: Group | None = None,
    ) -> SyncFuture:
        """Send the calls of a sync. Only the targets of ``resynced`` take part, if it is given."""
        with self._lock:
            self._check_open()
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    _close_pairs(self._dropped.popleft())
            if self._running is not None and self._running.done():
                self._running.exception()  # if it failed, its connections are closed
                self._running = None
            targets = [side for side in self._targets if resynced in (None, side.core)]
            while True:
                pairs = self._connected(targets)
                with hold_order(pairs):
                    if all(pair.is_current for pair in pairs):
                        chosen = _checked_verify(verify or self._verify)
                        number = self._next_number(pairs)
                        if self._staleness is not None:
                            self._staleness._request("expect", number)
                        request = SyncRequest("", number, chosen, self._timeout, step)
                        expected = self._expect_change if expect_change is None else expect_change
                        is_resync = resynced is not None
                        on_end = functools.partial(self._note_outcome, number, pairs, expected, is_resync)
                        return self._send(pairs, request, on_end)

    def _connected(self, targets: Sequence[SyncSide]) -> list[SyncPair]:
        """Return a pair for each target, all current a moment ago.

        Raises:
            GroupClosed, GroupBroken, WorkerDiedError: if a group takes no calls.
        """
        try:
            for side in (self._source, *targets):
                side.core.check()
        except GroupError:  # the connections are useless now
            _close_pairs(self._pairs)
            raise
        for target in targets:
            pair = self._pairs.get(target)
            if pair is not None and not pair.is_current:
                self._pairs.pop(target).close()
            if target not in self._pairs:
                self._pairs[target] = connect_pair(self._source, target, self._options)
        return [self._pairs[target] for target in targets]

    def _send(
        self,
        pairs: Sequence[SyncPair],
        request: SyncRequest,
        on_end: Callable[[WeightsVersion | BaseException], None],
    ) -> SyncFuture:
        began, number = time.monotonic(), request.number
        for pair in pairs:  # now: the caller may restart before it asks for the outcome
            pair.target.core.had_weights.setdefault(pair.target.key, number)
        sent: list[tuple[SyncPair, Sequence[Call]]] = []
        calls: list[Call] = []
        try:
            for pair in pairs:
                known = pair.known
                if known != pair.target.core.had_weights.get(pair.target.key):
                    known = None  # another sync came after it
                connection = pair.request.connection
                own = request._replace(connection=connection, last=pair.known, known=known)
                sent.append((pair, pair.send(own, self._running.calls if self._running else ())))
                calls += sent[-1][1]
        except BaseException:
            for call in calls:
                with contextlib.suppress(PhalanxError):  # the group was closed, and with it the call
                    call.cancel()
            raise
        text = f"in the sync of weights {self.name!r} from {self._source.title!r} to version {number}"
        self._running = SyncFuture(sent, number, began, text, on_end, self._lock)
        return self._running

    def _next_number(self, pairs: Sequence[SyncPair]) -> int:
        """Return a number greater than every number that a rank or the staleness manager knows.

        The number of a failed sync is used again: ranks that had begun with it reported so when they were connected.
        """
        published = self._source.core.published_weights
        last = published.get(self._source.key, 0)
        training = 0 if self._staleness is None else self._staleness.version  # loaded: of an earlier run
        newest = max(last, training, *(pair.newest for pair in pairs))
        self._newest = published[self._source.key] = newest + 1
        self._sent_from = frozenset(key_of(one.facts) for one in self._source.core.endpoints)
        return self._newest

    def _note_outcome(
        self,
        number: int,
        pairs: Sequence[SyncPair],
        expect_change: bool,
        is_resync: bool,
        outcome: WeightsVersion | BaseException,
    ) -> None:
        """Note the end of a sync in the groups, and warn if the source does not seem to train."""
        targets = [pair.target for pair in pairs]
        if not isinstance(outcome, WeightsVersion):
            for target in targets:
                target.notify(target.ranks, weight_handlers.tear, target.key, number)
            # not other pairs, connected since for a later sync
            if all(self._pairs.get(pair.target) is pair for pair in pairs):
                for target in targets:
                    target.core.note_weights(*target.key, f"failed({number})")
                _close_pairs(self._pairs)
                published, key = self._source.core.published_weights, self._source.key
                if published.get(key) == number:  # no rank has this version
                    published[key] = number - 1
            return
        for pair in pairs:
            pair.known = number
        if self._staleness is not None:
            self._advance(self._staleness, outcome, is_resync=is_resync)
        self._source.core.note_weights(*self._source.key, f"published({number})")
        for target in targets:
            had = target.core.had_weights
            had[target.key] = max(number, had.get(target.key, 0))
            target.core.note_weights(*target.key, f"whole({number})")
        if self._staleness is not None:
            self._staleness.serve(number)
        if not is_resync:  # which tells nothing about the trainer
            self._warn_if_unchanged(outcome, expect_change=expect_change)

    def _advance(self, staleness: StalenessManager, version: WeightsVersion, *, is_resync: bool) -> None:
        """Tell the staleness manager that a version was sent, from which the trainer continues.

        New rows are of that version once the targets have it.
        """
        stats = staleness.stats
        # The first version after a resume only restores weights: nothing was trained for it in this process.
        is_repeated = stats.restored or (
            is_resync if version.step is None else version.step == self._trained_step
        )
        trained = 0 if is_repeated else min(staleness.rows_per_version, stats.rows.ready)
        self._trained_step = version.step
        staleness.advance(version.number, trained=trained, serving=False)

    def _warn_if_unchanged(self, version: WeightsVersion, *, expect_change: bool) -> None:
        """Warn at the second sync in a row that changed nothing or, with ``expect_change``, at the first."""
        self._unchanged_syncs = 0 if version.changed else self._unchanged_syncs + 1
        if self._unchanged_syncs >= (1 if expect_change else 2):
            count = self._unchanged_syncs
            times = "the sync" if count == 1 else f"{count} syncs in a row"
            text = (
                f"weights {self.name!r}, version {version.number}: {times} changed nothing: the source publishes the "
                "same weights again; check that it trains them"
            )
            warnings.warn(text, RuntimeWarning, _user_stack_level())

    def newest(self, key: Key) -> int | None:
        """Return the number of the last sync to weights of that role and name; 0: none yet; None: not a target.

        This and the next three methods are those of :class:`phalanx.group.group.Resync`.
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
        if self._sent_from.isdisjoint(key_of(one.facts) for one in core.endpoints):
            return f"all ranks of their source {core.name!r} were started anew since the last sync"
        return ""

    def mend_source(self) -> None:
        """Recover the source, if it is broken and its policy allows."""
        _recover(self._source)

    def bring(self, to: Group) -> None:
        """Sync the source's weights to all ranks of a target group of which some are new."""
        with self._lock:
            if self._running is not None:
                self._running.exception()  # the loss of a rank has ended it, or will
            self._begin(expect_change=False, resynced=to).result()

    def _check_open(self) -> None:
        if self._closed:
            raise DeclarationError(f"this sync of weights {self.name!r} was closed; make another")

    def explain(self) -> Table:
        """Return a table of the bytes that a sync moves: by locality, rank and transport; casts, renames and ties.

        It connects both groups, as the first sync does.

        Raises:
            DeclarationError: if the sync was closed.
            PhalanxError: see :meth:`__call__`.
        """
        for side in (self._source, *self._targets):
            _recover(side)
        with self._lock:
            self._check_open()
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


def _recover(side: SyncSide) -> None:
    """Recover a broken group, if its policy allows.

    Not under the lock of the sync: a thread that recovers a target resyncs its new ranks, and needs the lock.
    """
    with contextlib.suppress(GroupBroken, GroupClosed):  # raised by the sync itself
        ensure_ready(side.core)


def _checked_verify(verify: Verify) -> Verify:
    if verify not in ("sampled", "full", "off"):
        raise DeclarationError(f'px.WeightSync(verify={verify!r}): give "sampled", "full" or "off"')
    return verify


def status(group: Ranks, name: str, *, timeout: float | None = None) -> dict[int, Weights]:
    """Return the state of the weights that a role accepts under ``name``, by rank.

    ``str()`` of each is "none" (from the constructor), "whole(3)" or "torn(3)". Ranks respond after the calls that
    were made before. Ranks whose process died are left out.

    Args:
        group: a group, a role of a group, or some of its ranks.
        name: name of the weights.
        timeout: seconds to wait for busy ranks; None waits as long as it takes.

    Raises:
        DeclarationError: if the role accepts no weights of that name.
        WeightsError: if a living rank did not respond.
    """
    side = side_of(group, "target", name)
    ranks = side.living(side.ranks)
    if not ranks:
        return {}
    title = f"px.weights.status({side.title!r}, {name!r})"
    call = run_on(side.core, weight_handlers.state, side.key, ranks=ranks, title=title, checked=False)
    answers = call.answers(timeout)
    for rank, answer in answers.items():
        if isinstance(answer, DeclarationError):
            raise DeclarationError(f"{title}: {answer}")
        if isinstance(answer, Exception):
            cause = answer if isinstance(answer, PhalanxError) else None
            raise WeightsError(f"{title}: rank {rank} did not respond: {answer}") from cause
    return answers


def _user_stack_level() -> int:
    """Return the number of frames from the caller to the first frame outside the library, for a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("phalanx."):
        level, frame = level + 1, frame.f_back
    return level
