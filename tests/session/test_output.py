"""What a driver shows of its ranks' output."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from phalanx.backends.backend_types import Endpoint
from phalanx.display.log_merging import Merged
from phalanx.session.output import Display
from tests.support.fault_workers import within

TRANSPORT: Any = SimpleNamespace(immediate=False, dead_of=lambda endpoints: [])


class Handle:
    """Of a process."""


def rank(files: str) -> Endpoint:
    slot: Any = None
    facts: Any = SimpleNamespace(files=files, log=None, slot=SimpleNamespace(host="here"))
    return Endpoint(slot, Handle(), facts)


def kept() -> int:
    return sum(isinstance(one, Merged) for one in gc.get_objects())


def test_of_a_group_that_has_ended_nothing_is_kept_while_others_are_shown() -> None:
    before, first, second = kept(), rank("first"), rank("second")
    display = Display()
    for name, one in (("a", first), ("b", second)):
        display.begin(TRANSPORT, [one], name, "merged")

    display.finish([first])

    assert within(30.0, lambda: kept() - before == 1)  # once a look that is under way is over
    display.finish()
