"""``px.WeightSync``: the weights of one role, whole and of one version, in the parameters of another."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

from phalanx.calls.future import CallFuture
from phalanx.calls.timeouts import checked
from phalanx.channels.staleness import StalenessManager
from phalanx.display.caller_frame import users_line
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError, GroupBroken, GroupClosed, PhalanxError
from phalanx.group.epoch import GroupState
from phalanx.group.membership_refresh import key_of
from phalanx.weights.pair_setup import MOVERS, Pair, PairOptions
from phalanx.weights.planning.digests import Verify
from phalanx.weights.planning.fused import Fused
from phalanx.weights.planning.locality import Hop
from phalanx.weights.planning.matching import Rename, renamer
from phalanx.weights.planning.resharding_planner import Plans
from phalanx.weights.planning.version_table import Stillness
from phalanx.weights.reachable import to_reachable
from phalanx.weights.staleness_updates import Pacing
from phalanx.weights.sync_calls import send_pair
from phalanx.weights.sync_future import PairCalls, SyncFuture
from phalanx.weights.sync_pairs import Pairs, part_dropped, part_when_dropped
from phalanx.weights.sync_sides import Ranks, SyncSide, all_in_order, ask_each, side_of
from phalanx.weights.versions import WeightsVersion
from phalanx.weights.worker import weight_handlers as questions
from phalanx.weights.worker.weight_requests import Since, SyncRequest

__all__ = ["WeightSync"]

_TIMEOUT_S = 600.0


class WeightSync:
    """Weights of a source role, in the parameters of target roles: ``version = sync()``.

    Sharded as they may be on each side, every target rank gets exactly the parts that it needs, and what arrived is
    compared with what was sent. The plan is made with the first sync, and again when a group has other processes.

    Args:
        source: the group, or role, whose workers called ``publish_weights``.
        target: the group or role whose workers called ``accept_weights``, or several of them.
        name: of the weights on the target's side, and on the source's unless ``source_name`` is given.
        source_name: what the source calls them.
        rename: from tensor names of the source to those of the target: a mapping, in whose names ``*`` stands for
            anything, or a function.
        fused: ``px.weights.Fused`` rules beside the built-in ones (``qkv_proj``, ``gate_up_proj``): those of
        Megatron are
            ``px.weights.Fused.megatron_qkv(...)`` and ``px.weights.Fused.megatron_glu()``.
        verify: "sampled" compares digests of one element of about each 8 KB; "full" of every bit; "off" of nothing.
        expect_change: warn at the first sync that changed nothing; else at the second in a row.
        transport: of what goes from node to node: "store" (the object store) or "process group".
        delta: only the elements whose bits changed since the version before travel, where ranks have segments or the
            object store between them; everything goes to a target that has not that version. The sources keep one
            more copy of what they send; see :meth:`explain`.
        staleness: is told of each version once the targets have it. Its versions then have the numbers of the weights.
            Up to ``rows_per_version`` rows count as trained on since the version before, none if the source's ``step``
            is the same.
        bucket_bytes: of the buckets in which weights travel. Between ranks of a node they have 16 MB at most; each
            source keeps two of those in memory.
        timeout: seconds that a rank waits for its peers, once it has begun.

    Raises:
        DeclarationError: an argument is none of these.
    """

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
        transport: Literal["store", "process group"] = "store",
        delta: bool = False,
        staleness: StalenessManager | None = None,
        bucket_bytes: int = 256 << 20,
        timeout: float | None = None,
    ) -> None:
        _check_verify(verify)
        if transport not in ("store", "process group"):
            raise DeclarationError(f'px.WeightSync(transport={transport!r}): give "store" or "process group"')
        if bucket_bytes < 4096:
            raise DeclarationError(
                f"px.WeightSync(bucket_bytes={bucket_bytes}): give at least 4096 bytes, better 256 MB"
            )
        renamer(rename)  # what is wrong with it is said here, at the line that gives it
        targets: list[Ranks] = [*target] if isinstance(target, Sequence) else [target]
        if not targets:
            raise DeclarationError("px.WeightSync(target=[]): give at least one group to sync to")
        self.name = name
        self._source = side_of(source, "source", source_name or name)
        self._targets = [side_of(one, "target", name) for one in targets]
        movers: Mapping[Hop, str] = {**MOVERS, Hop.OTHER: transport}
        self._options = PairOptions(rename, tuple(fused), bucket_bytes, movers, delta=delta)
        self._verify: Verify = verify
        self._expect_change = expect_change
        self._timeout = checked(timeout, "px.WeightSync") or _TIMEOUT_S
        plans = Plans(2 * len(targets))
        self._pairs = Pairs(self._source, self._targets, plans, self._options)
        self._lock = threading.RLock()
        part_when_dropped(self._pairs, self)
        self._known: dict[str, int] = {}
        self._last: SyncFuture | None = None
        self._unused: int | None = None
        self._newest = 0
        self._sent_from: frozenset[tuple[int, float]] = frozenset()
        self._stillness = Stillness()
        self._pacing = Pacing(staleness)
        self._since = Since(secrets.token_hex(6))
        self._closed = False
        for side in self._targets:
            side.core.weights_by.add(self)

    def __call__(
        self, *, step: int | None = None, expect_change: bool | None = None, verify: Verify | None = None
    ) -> WeightsVersion:
        """Sync, and wait until it is over.

        Args:
            step: refuse weights of another count of optimizer steps than this.
            expect_change, verify: as given to the sync, for this time.

        Raises:
            WeightsMismatch: the two sides do not fit; nothing was moved.
            As ``CallFuture.result``: a rank died or raised; the target's weights may be torn then.
        """
        return self.submit(step=step, expect_change=expect_change, verify=verify).result()

    def submit(
        self, *, step: int | None = None, expect_change: bool | None = None, verify: Verify | None = None
    ) -> CallFuture[WeightsVersion]:
        """Begin a sync: the future of its version. Both groups go on with calls made later once their part is over."""
        self._mend()
        return self._begin(step, expect_change, verify)

    def _mend(self) -> None:
        """Have groups that are broken mended as their policies say.

        Not under the lock: whoever mends a target brings weights to its new ranks by this sync, and waits for the lock.
        """
        for side in (self._source, *self._targets):
            with contextlib.suppress(GroupBroken, GroupClosed):  # which is said under the lock
                side.core.ensure_ready()

    def _begin(
        self,
        step: int | None = None,
        expect_change: bool | None = None,
        verify: Verify | None = None,
        among: Sequence[SyncSide] | None = None,
    ) -> CallFuture[WeightsVersion]:
        with self._lock:
            self._check_open()
            self._settle()
            while True:
                pairs = self._pairs.present(among)
                with all_in_order([side.core for pair in pairs for side in (pair.source, pair.target)]):
                    if all(pair.current for pair in pairs):
                        future = self._send(pairs, step, expect_change, _check_verify(verify or self._verify))
                        break
            self._last = future
            return future

    def newest(self, key: tuple[str, str]) -> int | None:
        """The newest version sent to weights of that role and name; 0: none yet; None: this does not go there."""
        goes = not self._closed and any(one.key == key for one in self._targets)
        return self._newest if goes else None

    def doubt(self) -> str:
        """Why the source may not have the weights any more that it had at the last sync, in words; "" where it has."""
        core = self._source.core
        if core.closed:
            return f"their source {core.name!r} is closed"
        if not self._newest:
            return f"this px.WeightSync from {core.name!r} has sent none yet"
        if self._sent_from.isdisjoint(key_of(one.facts) for one in core.endpoints):
            return f"all ranks of their source {core.name!r} were started anew since the last sync"
        return ""

    def mend_source(self) -> None:
        """Have the source mended, if it is broken and its policy says so."""
        with contextlib.suppress(GroupBroken, GroupClosed):  # which the sync says
            self._source.core.ensure_ready()

    def bring(self, to: GroupState) -> None:
        """Bring the source's present weights to all ranks of a target, and of the other targets that can be called."""
        with self._lock, self._pacing.brought_again():
            if self._last is not None:
                self._last.exception()  # one under way, which the loss of a rank has ended or will end
            before, self._stillness = self._stillness, Stillness()
            # That nothing changed says nothing of the trainer.
            to_reachable(
                self._targets, to, lambda among: self._begin(expect_change=False, among=among).result()
            )
            self._stillness = before

    def _check_open(self) -> None:
        if self._closed:
            raise DeclarationError(f"this sync of weights {self.name!r} was closed; make another")

    def _settle(self) -> None:
        """See whether the sync before this one failed: its ends are gone then. So are those of dropped syncs."""
        part_dropped()
        if self._last is not None and self._last.done():
            self._last.exception()
            self._last = None

    def _send(
        self, pairs: Sequence[Pair], step: int | None, expect_change: bool | None, verify: Verify
    ) -> SyncFuture:
        began = time.monotonic()
        number, self._unused = self._next_number(pairs, self._unused), None
        for pair in pairs:  # now, for nobody needs to ask what became of it before a restart
            pair.target.core.life.had_weights.setdefault(pair.target.key, number)
        sent: list[PairCalls] = []
        try:
            for pair in pairs:
                known = self._known_of(pair)
                order = SyncRequest(pair.key, number, verify, self._timeout, step, self._since, known)
                sent.append(send_pair(pair, order, self._last))
        except BaseException:
            for call in [call for calls in sent for call in calls.calls]:
                with contextlib.suppress(PhalanxError):  # of a group that is gone: so is its call
                    call.cancel()
            raise
        expected = self._expect_change if expect_change is None else expect_change
        text = f"in the sync of weights {self.name!r} from {self._source.title!r} to version {number}"
        on_end = functools.partial(self._ended, number, pairs, expected)
        return SyncFuture(sent, number, began, text, on_end, self._lock)

    def _known_of(self, pair: Pair) -> int | None:
        """The version that all targets of a pair have got over its ends, unless another sync came after it."""
        number = self._known.get(pair.key)
        return number if number == pair.target.core.life.had_weights.get(pair.target.key) else None

    def _ended(
        self, number: int, pairs: Sequence[Pair], expect_change: bool, outcome: WeightsVersion | BaseException
    ) -> None:
        """Note what came of a sync: what its groups know of versions, and whether the trainer trains."""
        targets = [pair.target for pair in pairs]
        if not isinstance(outcome, WeightsVersion):
            for target in targets:
                ask_each(target.core, target.ranks, questions.tear, target.asked, number)
            if self._pairs.has(pairs):  # and not others, made since for a later sync
                for target in targets:
                    target.core.life.note_weights(*target.key, f"failed({number})")
                self._known = {}
                self._pairs.part()
                self._unused = number
            return
        self._known = {pair.key: number for pair in pairs}
        self._note_sent(outcome)
        self._note_versions(number, targets)
        self._warn(outcome, expect_change)  # last, since a warning may be an error

    def _next_number(self, pairs: Sequence[Pair], unused: int | None) -> int:
        """The number of the next version: more than anybody knows of.

        ``unused`` is that of a sync that failed; ranks that had begun with it said so when these pairs were made.
        """
        published = self._source.core.life.published_weights
        last = published.get(self._source.key, 0)
        known = [
            last - 1 if last == unused else last,
            self._pacing.newest(),
            *(pair.newest for pair in pairs),
        ]
        self._newest = published[self._source.key] = max(known) + 1
        self._sent_from = frozenset(key_of(one.facts) for one in self._source.core.endpoints)
        return self._newest

    def _note_versions(self, number: int, targets: Sequence[SyncSide]) -> None:
        for target in targets:
            had = target.core.life.had_weights
            had[target.key] = max(number, had.get(target.key, 0))
            target.core.life.note_weights(*target.key, f"whole({number})")
        self._pacing.served(number)

    def _note_sent(self, version: WeightsVersion) -> None:
        self._pacing.sent(version)
        self._source.core.life.note_weights(*self._source.key, f"published({version.number})")
        self._since = Since(self._since.link, max(version.number, self._since.number))
        self._stillness = self._stillness.after(version.changed)

    def _warn(self, version: WeightsVersion, expect_change: bool) -> None:
        """Say where a trainer seems not to train."""
        warning = self._stillness.warning(expect_change=expect_change)
        if warning is not None:
            text = f"weights {self.name!r}, version {version.number}: {warning}"
            warnings.warn(text, RuntimeWarning, users_line())

    def explain(self) -> Table:
        """What a sync moves: bytes by hop, rank and mover; what is cast, renamed, tied, and left over.

        Raises:
            DeclarationError: it was closed.
            As the first sync: it asks both groups what they have, and plans.
        """
        self._mend()
        with self._lock:
            self._check_open()
            return self._pairs.explain(self.name)

    def close(self) -> None:
        """Give back what the ranks keep for it: segments, connections, process groups. May be called again."""
        with self._lock:
            self._closed = True
            self._pairs.part()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_verify(verify: Verify) -> Verify:
    if verify not in ("sampled", "full", "off"):
        raise DeclarationError(f'px.WeightSync(verify={verify!r}): give "sampled", "full" or "off"')
    return verify
