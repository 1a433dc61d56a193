"""Seeded schedules of a channel and a staleness: producers and consumers that die, slow puts, closes at any moment.

After every step the count equations are checked, and every delivered row is compared with the bound on its version.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from phalanx.channels.channel_state import By, ChannelState
from phalanx.channels.staleness_state import Item, StalenessState
from tests.channels.test_channel import all_are_accounted_for

STEPS = 45
PEERS = 3
OTHERS = ["cancel", "requeue", "drop", "kill", "end", "accept", "leave", "move", *["advance"] * 2]


class Schedule:
    """A schedule of a seed: ``run()`` raises AssertionError at the first violated promise."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        choose = self._random.choice
        maxsize = choose([None, 1, 3, 12])
        by: By = "items" if choose([True, False]) else "bytes"
        self._reclaimed: Counter[int] = Counter()
        self.channel = ChannelState("c", maxsize, by, reclaim=self._reclaim)
        numbers = choose([0, 1, 2, 3]), choose([1, 2, 4]), choose([0, 1, 2])
        self.staleness = StalenessState(*numbers, evict=lambda: self.channel.expire())
        self._lives: Counter[tuple[str, int]] = Counter()
        self._puts: Counter[str] = Counter()
        self._order: dict[str, list[int]] = {}
        self._origin: dict[int, tuple[str, int]] = {}
        self._waiting: list[tuple[Any, tuple[str, int]]] = []
        self._served: dict[tuple[str, int], int] = {}
        self._number = 0
        self.told_lost = 0

    def run(self) -> None:
        """Take random steps, then finish, and deliver the rest."""
        for _ in range(STEPS):
            self._step()
            self._check()
        self._random.choice([self.channel.finish, lambda: self.channel.close("closed")])()
        self._check()
        self._drain()

    def _reclaim(self, item: Item) -> None:
        self._reclaimed[item.number] += 1
        assert self._reclaimed[item.number] == 1

    def _peer(self, kind: str) -> str:
        index = self._random.randrange(PEERS)
        return f"{kind}{index}.{self._lives[kind, index]}"

    def _request(self, peer: str, state: Any) -> tuple[str, int]:
        self._number += 1
        self._waiting.append((state, (peer, self._number)))
        return peer, self._number

    def _step(self) -> None:
        step = self._random.choice(
            ["put"] * 4 + ["put_leased"] * 4 + ["take"] * 4 + ["ack"] * 3 + ["lease"] * 3 + ["other"] * 5
        )
        if step == "other":
            step = self._random.choice(OTHERS)
        getattr(self, f"_do_{step}")()

    def _do_put(self, lease: Any = None, versions: tuple[int, ...] = ()) -> None:
        rows = len(versions) or self._random.choice([None, 0, 1, 2, 5])
        if lease is not None and not self.staleness.begin_put(lease, versions):
            return
        producer = self._peer("p")
        payload = self._random.choice([b"", "stored"])
        bounded = self.staleness if versions else None
        request = self._request(producer, self.channel)
        item = Item(request, payload, self._random.randrange(9), rows, (), versions, bounded)
        place = self._puts[producer]
        self._puts[producer] += 1

        def done(answer: tuple[Any, ...]) -> None:
            if answer[0] == "accepted":
                self._origin[answer[1]] = (producer, place)
                order = self._order.setdefault(producer, [])
                assert not order or order[-1] < place, "order of a producer"
                order.append(place)

        self.channel.put(done, item)

    def _do_put_leased(self) -> None:
        if self.staleness._leases:
            lease = self._random.choice([*self.staleness._leases])
            running = self.staleness._leases[lease]
            rows = self._random.randint(1, max(1, min(running, 4)))
            if rows <= running:
                oldest = self._served[lease]
                versions = tuple(
                    self._random.randint(max(0, oldest - 1), self.staleness.version) for _ in range(rows)
                )
                self._do_put(lease, versions)

    def _do_take(self) -> None:
        consumer, rows = self._peer("c"), self._random.random() < 0.5
        count = self._random.randint(1, 5)

        def done(answer: tuple[Any, ...]) -> None:
            if answer[0] == "lost":
                self.told_lost += sum(loss.items for loss in answer[1])
            if answer[0] == "taken":
                self._check_slices(answer[1])
                taken = sum(part.rows for part in answer[1]) if rows else len(answer[1])
                assert taken == count or (answer[2] and taken < count)

        self.channel.take(self._request(consumer, self.channel), done, count, rows, count)

    def _check_slices(self, slices: Any) -> None:
        assert [part.number for part in slices] == sorted(part.number for part in slices)
        for part in slices:
            if part.item.versions:
                oldest = min(part.item.versions[part.start : part.stop])
                assert self.staleness.version - oldest <= self.staleness.max_lag, "delivered above max_lag"

    def _do_lease(self) -> None:
        most = (self.staleness.max_lag + 1) * self.staleness.rows_per_version
        rows = self._random.randint(1, min(most, 4))
        request = self._request(self._peer("p"), self.staleness)

        def done(answer: tuple[Any, ...]) -> None:
            if answer[0] == "leased":
                self._served[request] = answer[1]

        self.staleness.lease(request, done, rows)

    def _lease(self) -> Any:
        return self._random.choice([*self.channel.leases, ("nobody", 0)])

    def _do_ack(self) -> None:
        self.channel.ack(self._lease())

    def _do_requeue(self) -> None:
        lease = self._lease()
        found = self.channel.leases.get(lease)
        unreadable = {found[0].number} if found and self._random.random() < 0.3 else set()
        losses = self.channel.requeue(lease, unreadable)  # a waiting take may be notified of other losses
        self.told_lost += sum(loss.items for loss in losses)

    def _do_cancel(self) -> None:
        if self._waiting:
            state, request = self._waiting.pop(self._random.randrange(len(self._waiting)))
            self._random.choice([state.cancel, state.withdraw])(request)

    def _do_drop(self) -> None:
        numbers = (
            None if self._random.random() < 0.3 else {units.number for units in [*self.channel._waiting][::2]}
        )
        self.channel.drop("by request", numbers)

    def _do_kill(self) -> None:
        kind, index = self._random.choice("pc"), self._random.randrange(PEERS)
        peer = f"{kind}{index}.{self._lives[kind, index]}"
        self._lives[kind, index] += 1
        self.staleness.peer_died(peer, "killed")
        self.channel.peer_died(peer, "killed")
        assert not [lease for lease in self.channel.leases if lease[0] == peer]

    def _do_advance(self) -> None:
        trained = self._random.choice([None, None, None, 0])
        version = self.staleness.version + self._random.choice([1, 1, 1, 2])
        self.staleness.advance(version, trained)

    def _do_end(self) -> None:
        if self.staleness._leases:
            self.staleness.end(self._random.choice([*self.staleness._leases]), "not accepted")

    def _do_accept(self) -> None:
        if self.staleness._leases:
            self.staleness.accept(self._random.choice([*self.staleness._leases]), [self.staleness.version])

    def _do_leave(self) -> None:
        if self._random.random() < 0.2:
            self.channel.leave(self._peer("p"))

    def _do_move(self) -> None:
        for units in self.channel._open[:1]:
            self.channel.move(units.number, b"here")

    def _check(self) -> None:
        channel, stats = self.channel, self.staleness.stats()
        assert all_are_accounted_for(channel)
        assert channel.items.submitted == len(self._origin)
        assert channel.items.lost <= self.told_lost + sum(loss.items for loss in channel.losses)
        rows = stats.rows
        assert rows.submitted == rows.accepted + rows.dropped + rows.running
        assert rows.running >= 0
        assert all(
            0 <= lag <= self.staleness.max_lag or not count for lag, count in stats.lags.items() if lag > 0
        )
        assert not (channel._takes and channel._puts), "a put and a take wait for each other"
        assert channel._rows == sum(units.rows for units in channel._waiting)
        assert channel._nbytes == sum(units.nbytes for units in channel._waiting)
        waiting = {
            (units.item, row)
            for units in channel._waiting
            for row in range(units.start, units.stop)
            if units.item.bounded is not None
        }
        for (item, row), (is_waiting, _) in self.staleness._ready.items():
            assert not (item.number >= 0 and is_waiting) or (item, row) in waiting
        for units in channel._waiting:
            assert not any(map(units.item.is_stale, range(units.start, units.stop)))

    def _drain(self) -> None:
        for _ in range(300):
            answers: list[tuple[Any, ...]] = []
            self.channel.take(("last", _), answers.append, 2, False, 1)
            self.channel.cancel(("last", _))
            if answers[0][0] == "taken":
                self._check_slices(answers[0][1])
            if answers[0][0] == "lost":
                self.told_lost += sum(loss.items for loss in answers[0][1])
            for lease in list(self.channel.leases):
                self.channel.ack(lease)
            self._check()
            if answers[0][0] == "ended":
                break
        counts = self.channel.items
        assert counts.submitted == counts.delivered + counts.dropped + counts.lost


def run(seeds: range) -> None:
    for seed in seeds:
        try:
            Schedule(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("block", range(4))
def test_schedules_keep_every_promise(block: int) -> None:
    run(range(250 * block, 250 * (block + 1)))


@pytest.mark.soak
def test_twenty_thousand_schedules_keep_every_promise() -> None:
    run(range(1_000, 21_000))
