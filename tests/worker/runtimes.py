"""The runtime of a rank in this process; nothing is sent, so no backend is needed."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

from phalanx.topology.slots import SlotFacts
from phalanx.wire.codec import encode
from phalanx.wire.messages import ANY_EPOCH, Message, RankCall, RankConfig
from phalanx.worker.worker_runtime import WorkerRuntime

EPOCH = 3


class Services:
    """What a backend gives a rank."""

    in_driver = True

    def __init__(self) -> None:
        self._ids = itertools.count(70000)

    def facts(self) -> tuple[SlotFacts, tuple[str, ...]]:
        return SlotFacts("n", "h", "127.0.0.1", (), 1), ()

    def call_id(self) -> int:
        return next(self._ids)

    def folder(self) -> str:
        return ""

    def put(self, value: Any) -> Any:
        return value

    def fetch(self, refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
        return list(refs)


def runtime_of(cls: type) -> WorkerRuntime:
    """Return rank 0 of one, in ``EPOCH``."""
    made = WorkerRuntime(Services())
    config = RankConfig(0, 1, 0, 1, "g", EPOCH, {})
    made.setup(config.pack(pickle.dumps(encode({"": (cls, (), {})}))), ())
    return made


def message(method: str, epoch: int = ANY_EPOCH, *, keep: bool = True) -> Message:
    """Return a call without arguments."""
    return RankCall(epoch, "", method, keep).pack()
