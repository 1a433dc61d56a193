"""Seeded schedules of a hub: producers and consumers that die, slow puts, closes at any moment.

After every step the count equations are checked, and every delivered row is compared with the bound on its version.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from phalanx.channels.channel_state import Loss, RowRange
from phalanx.channels.hub import Hub, Leased, StoredPayload
from phalanx.channels.staleness_state import Gone, RequestId
from phalanx.errors import ChannelError, ItemsLost, StalenessTimeout
from tests.channels.test_channel import all_are_accounted_for

LENGTH = 45
PEERS = 3
RARE = [
    "cancel",
    "withdraw",
    "requeue",
    "drop",
    "kill",
    "end",
    "accept",
    "leave",
    "move",
    "advance",
    "advance",
]
STEPS = ["put", "put leased", "take"] * 8 + ["ack", "lease"] * 6 + RARE
Receive = Callable[[RequestId, Any], None]


class Schedule:
    """A schedule of a seed: ``run()`` raises AssertionError at the first violated promise."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        choose = self._random.choice
        self._hub = Hub()
        self._receive: dict[int, Receive | None] = {}
        self._tickets = itertools.count()
        self._lives = Counter[tuple[str, int]]()
        self._placed = defaultdict[str, list[int]](list)
        """Numbers of the accepted puts of each producer."""
        self._reclaimed: set[int] = set()
        self._served: dict[RequestId, int] = {}
        """Version of each row lease."""
        self._sent: list[tuple[str, RequestId]] = []
        self._told_lost = 0
        self._hub.connect("owner", self._answer)
        self._ask("owner", "", "open", "c", "c", choose([None, 1, 3, 12]), choose(["items", "bytes"]))
        numbers = choose([0, 1, 2, 3]), choose([1, 2, 4]), choose([0, 1, 2])
        self._ask("owner", "", "open_staleness", "s", *numbers)
        self._channel: Any = self._hub._states["c"]
        self._staleness: Any = self._hub._states["s"]

    def run(self) -> None:
        """Take random steps, then finish or close the channel, and deliver the rest."""
        for _ in range(LENGTH):
            self._step(self._random.choice(STEPS), self._random)
            self._check()
        self._ask("owner", "c", *self._random.choice([("finish",), ("close", "closed")]))
        self._check()
        self._drain()

    def _ask(self, peer: str, key: str, verb: str, *args: Any, receive: Receive | None = None) -> RequestId:
        ticket = next(self._tickets)
        self._receive[ticket] = receive
        if verb in ("put", "take", "lease"):
            self._sent.append((key, (peer, ticket)))
        self._hub.execute(peer, [(ticket, key, verb, args)])
        return peer, ticket

    def _answer(self, ticket: int | None, result: Any, peer: str = "owner") -> None:
        if ticket is None:
            assert result not in self._reclaimed
            self._reclaimed.add(result)
            return
        receive = self._receive.pop(ticket)  # fails at the second answer
        if isinstance(result, ItemsLost):
            self._lost((peer, ticket), result.losses)
        elif isinstance(result, Exception):
            assert isinstance(result, (Gone, ChannelError, StalenessTimeout)), result
        elif receive is not None:
            receive((peer, ticket), result)

    def _peer(self, kind: str) -> str:
        index = self._random.randrange(PEERS)
        peer = f"{kind}{index}.{self._lives[kind, index]}"
        self._hub.connect(peer, partial(self._answer, peer=peer))
        return peer

    def _step(self, step: str, chance: random.Random) -> None:
        channel, staleness, producer = self._channel, self._staleness, self._peer("p")
        taken = chance.choice([*channel.leases, ("nobody", 0)])
        running = [lease for lease in staleness._leases if lease in self._served]  # others are puts that wait
        lease = chance.choice(running) if running else ("nobody", 0)
        match step:
            case "put":
                self._put(producer, chance.choice([None, 0, 1, 2, 5]), None)
            case "put leased" if running:
                rows = chance.randint(1, min(staleness._leases[lease], 4))
                oldest = max(0, self._served[lease] - 1)
                versions = tuple(chance.randint(oldest, staleness.version) for _ in range(rows))
                self._put(producer, rows, ("s", lease, versions))
            case "take":
                by_rows, most = chance.random() < 0.5, chance.randint(1, 5)
                self._take(self._peer("c"), most, by_rows, chance.choice([most, 1]))
            case "ack":
                self._ask("owner", "c", "ack", taken)
            case "requeue":
                found = channel.leases.get(taken)
                unreadable = {found[0].number} if found and chance.random() < 0.3 else set[int]()
                self._ask("owner", "c", "requeue", taken, unreadable, receive=self._lost)
            case "lease":
                rows = chance.randint(1, min((staleness.max_lag + 1) * staleness.rows_per_version, 4))
                self._ask(producer, "s", "lease", rows, receive=self._served.__setitem__)
            case "cancel" | "withdraw" if self._sent:
                key, request = self._sent.pop(chance.randrange(len(self._sent)))
                self._ask("owner", key, step, request)
            case "drop":
                numbers = {units.number for units in [*channel._waiting][::2]}
                self._ask("owner", "c", "drop", "by request", None if chance.random() < 0.3 else numbers)
            case "kill":
                peer = self._peer(chance.choice("pc"))
                self._lives[peer[0], int(peer[1])] += 1
                self._hub.peer_died(peer, "killed")
                assert not [lease for lease in channel.leases if lease[0] == peer]
            case "end":
                self._ask("owner", "s", "end", lease, "not accepted")
            case "accept":
                self._ask("owner", "s", "accept", lease, [staleness.version])
            case "leave" if chance.random() < 0.2:
                self._ask("owner", "c", "leave", producer)
            case "move":
                for units in channel._open[:1]:
                    self._ask("owner", "c", "move", units.number, b"here")
            case "advance":
                version = staleness.version + chance.choice([1, 1, 1, 2])
                self._ask("owner", "s", "advance", version, chance.choice([None, None, None, 0]))
            case _:
                pass

    def _put(self, producer: str, rows: int | None, leased: Leased | None) -> None:
        number = next(self._tickets)
        payload = self._random.choice([b"", StoredPayload(producer, number, "there")])

        def placed(_: RequestId, answer: tuple[int, int]) -> None:
            if answer[0] >= 0:
                order = self._placed[producer]
                assert not order or order[-1] < number, "order of a producer"
                order.append(number)

        packed = payload, self._random.randrange(9), rows, ()
        self._ask(producer, "c", "put", packed, leased, receive=placed)

    def _take(self, consumer: str, most: int, by_rows: bool, at_least: int) -> RequestId:
        def took(_: RequestId, answer: tuple[list[RowRange], bool]) -> None:
            ranges, short = answer
            self._check_ranges(ranges)
            count = sum(part.rows for part in ranges) if by_rows else len(ranges)
            assert at_least <= count <= most or (short and count < at_least)

        return self._ask(consumer, "c", "take", most, by_rows, at_least, receive=took)

    def _lost(self, _: RequestId, losses: Iterable[Loss]) -> None:
        self._told_lost += sum(loss.items for loss in losses)

    def _check_ranges(self, ranges: list[RowRange]) -> None:
        assert ranges == sorted(ranges)
        for part in ranges:
            if part.item.versions:
                oldest = min(part.item.versions[part.start : part.stop])
                assert self._staleness.version - oldest <= self._staleness.max_lag, "delivered above max_lag"

    def _check(self) -> None:
        channel, stats = self._channel, self._staleness.stats()
        assert all_are_accounted_for(channel)
        assert channel.items.submitted == sum(map(len, self._placed.values()))
        assert channel.items.lost <= self._told_lost + sum(loss.items for loss in channel.losses)
        rows = stats.rows
        assert rows.submitted == rows.accepted + rows.dropped + rows.running
        assert rows.running >= 0
        assert all(0 <= lag <= self._staleness.max_lag for lag in stats.lags)
        assert not (channel._takes and channel._puts), "a put and a take wait for each other"
        assert channel._rows == sum(units.rows for units in channel._waiting)
        assert channel._nbytes == sum(units.nbytes for units in channel._waiting)
        waiting = {(units.item, row) for units in channel._waiting for row in range(units.start, units.stop)}
        for (item, row), (is_waiting, _) in self._staleness._ready.items():
            assert not (item.number >= 0 and is_waiting) or (item, row) in waiting
        assert not any(item.is_stale(row) for item, row in waiting)

    def _drain(self) -> None:
        self._hub.connect("last", partial(self._answer, peer="last"))
        while self._channel._waiting or self._channel.leases or self._channel._puts:
            self._ask("last", "c", "cancel", self._take("last", 2, False, 1))
            for lease in list(self._channel.leases):
                self._ask("owner", "c", "ack", lease)
            self._check()


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(start, start + 250) for start in range(0, 1_000, 250)),
        pytest.param(range(1_000, 21_000), marks=pytest.mark.soak),
    ],
)
def test_schedules_keep_every_promise(seeds: range) -> None:
    for seed in seeds:
        try:
            Schedule(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
