"""The runner: every repetition measures the contenders in turn, so that all meet the same noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.accounts import Account, PeakWatch
from bench.protocol import ContenderLost, Peer, RequestFailed
from bench.scenarios import (
    ALL_BYTES,
    BARE,
    FLOOR,
    PHALANX,
    UNSAVED,
    UNTRACED,
    UNVERIFIED,
    VERL,
    VERL_NUMPY,
    Block,
    Step,
)
from bench.stats import Case, Sample

SERVED_BY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    PHALANX: (PHALANX, {}),
    UNTRACED: (PHALANX, {"traced": False}),
    UNSAVED: (PHALANX, {"saving": False}),
    ALL_BYTES: (PHALANX, {"verify": "full"}),
    UNVERIFIED: (PHALANX, {"verify": "off"}),
    VERL: (VERL, {}),
    VERL_NUMPY: (VERL, {"serialization": "numpy"}),
    BARE: (BARE, {}),
    FLOOR: (FLOOR, {}),
}
"""Label of a contender -> the process that serves it, and additional arguments."""

FEWEST_REPEATS = 2


@dataclass
class Run:
    """A run over living contenders. Failures become notes, and the rest continues."""

    peers: dict[str, Peer]
    deadline: float
    say: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _without_group: set[str] = field(default_factory=set)

    def walk(self, block: Block) -> None:
        """Start the block's groups, measure its steps, close the groups."""
        self._without_group = set()
        if block.groups:
            self._measure_starts(block)
        for step in block.steps:
            self._measure(step, step.contenders)
        for group in block.groups:
            for name in self._able():
                self._ask(name, "close", group=group)
        self._without_group = set()
        self._measure_apart(block)

    def _able(self) -> list[str]:
        """Return the living contenders whose groups have all started in this block."""
        return [name for name in self.peers if name not in self._without_group]

    def _open(self, name: str, group: str, ranks: int) -> float | None:
        seconds = self._ask(name, "open", group=group, ranks=ranks, timeout=300.0)
        if seconds is None:
            self._without_group.add(name)
        return seconds

    def _measure_starts(self, block: Block) -> None:
        case, rounds = Case("start", block.ranks), block.start_warmups + max(block.starts, 1)
        for turn in range(rounds):
            self.say(f"{case.label()} ({turn + 1} of {rounds})")
            for name in _rotated(self._able(), turn):
                seconds = self._open(name, "a", block.ranks)
                if seconds is not None and turn >= block.start_warmups and name != FLOOR:
                    self.samples.append(Sample(case, name, seconds))
                if seconds is not None and turn < rounds - 1:
                    self._ask(name, "close", group="a")

    def _measure_apart(self, block: Block) -> None:
        """Measure the contenders in sequence, each with its own groups."""
        for label in dict.fromkeys(label for step in block.apart for label in step.contenders):
            name = SERVED_BY[label][0]
            if name not in self.peers:
                continue
            opened = [g for g in block.apart_groups if self._open(name, g, block.ranks) is not None]
            if len(opened) == len(block.apart_groups):
                for step in block.apart:
                    if label in step.contenders:
                        self._measure(step, (label,))
            for group in opened:
                self._ask(name, "close", group=group)

    def _measure(self, step: Step, contenders: Sequence[str]) -> None:
        labels = [label for label in contenders if SERVED_BY[label][0] in self._able()]
        took = dict.fromkeys(labels, 0.0)
        for turn in range(step.warmups + step.repeats):
            if time.monotonic() > self.deadline and turn >= step.warmups + FEWEST_REPEATS:
                break
            self.say(f"{step.case.label()} ({turn + 1} of {step.warmups + step.repeats})")
            warms_up = turn < step.warmups
            args = {**step.args, **(step.warming if warms_up else {})}
            for label in _rotated([one for one in labels if _has_a_turn(step, turn, took[one])], turn):
                served_by, extra = SERVED_BY[label]
                begun = time.monotonic()
                seconds = self._ask(served_by, step.op, as_label=label, **args, **extra)
                took[label] += time.monotonic() - begun
                if seconds is None:
                    labels = [other for other in labels if other != label]
                elif not warms_up:
                    self.samples.append(Sample(step.case, label, seconds))
        if step.account:
            for label in labels:
                self._account(step, label)
        if step.case.megabytes:
            for name in {SERVED_BY[label][0] for label in labels}:
                self._ask(name, "tidy")

    def _account(self, step: Step, label: str) -> None:
        served_by, extra = SERVED_BY[label]
        if label == FLOOR or served_by not in self.peers:
            return
        groups = step.args.get("groups") or [step.args["group"]]
        pids = self._ask(served_by, "pids", groups=groups)
        if pids is None:
            return
        watch = PeakWatch(self.peers[served_by].pid, pids)
        parameters = {**step.args, **extra}
        answer = self._ask(
            served_by, "account", as_label=label, on_wait=watch.look, scenario=step.op, parameters=parameters
        )
        if answer is None:
            return
        counted = ("store_created", "store_peak", "driver_fetched")
        self.accounts.append(
            Account(
                contender=label,
                label=step.case.label(),
                payload=step.case.megabytes << 20,
                driver_peak=watch.driver,
                workers_peak=watch.workers,
                **{name: answer[name] for name in counted},
                counters={name: value for name, value in answer.items() if name not in counted},
            )
        )

    def _ask(
        self,
        name: str,
        op: str,
        *,
        as_label: str = "",
        timeout: float = 120.0,
        on_wait: Callable[[], None] | None = None,
        **args: Any,
    ) -> Any:
        """Return the response, or None with a note if there is none."""
        peer = self.peers.get(name)
        if peer is None:
            return None
        try:
            return peer.ask(op, timeout=timeout, on_wait=on_wait, **args)
        except RequestFailed as error:
            self._note(f"{as_label or name}: {error}")
        except ContenderLost as error:
            del self.peers[name]
            self._note(f"{error}\n{name} is left out from here on")
        return None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.say(f"note: {text}")


def _has_a_turn(step: Step, turn: int, took: float) -> bool:
    """Return whether a contender, whose turns took ``took`` seconds, has another turn."""
    return turn <= step.warmups or took < step.seconds


def _rotated(names: list[str], turn: int) -> list[str]:
    """Return the names, rotated by the turn."""
    shift = turn % len(names) if names else 0
    return [*names[shift:], *names[:shift]]
