"""Which of vLLM's parts sleep: its engine puts all of them to sleep together, and wakes only what sleeps."""

from __future__ import annotations

from collections.abc import Collection

from phalanx.engines.calls import TAGS

__all__ = ["SLEEP", "orders"]

SLEEP: tuple[str, ...] = ()
"""The order that puts all parts to sleep; every other order wakes the parts that it names."""


def orders(asleep: Collection[str], wanted: Collection[str]) -> list[tuple[str, ...]]:
    """What the engine, of which the parts ``asleep`` sleep, is told so that those of ``wanted`` do."""
    now, then = set(asleep), set(wanted)
    if then <= now:
        return [_named(now - then)] if now - then else []
    # One that sleeps in part cannot be put to sleep.
    told = [_named(now), SLEEP] if now else [SLEEP]
    rest = set(TAGS) - then
    return [*told, _named(rest)] if rest else told


def _named(tags: Collection[str]) -> tuple[str, ...]:
    return tuple(tag for tag in TAGS if tag in tags)
