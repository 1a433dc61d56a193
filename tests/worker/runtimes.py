"""The runtime of a rank in this process, as the inline backend has it."""

from __future__ import annotations

import pickle

from phalanx.backends.inline import InlineServices
from phalanx.topology.slots import SlotInfo
from phalanx.wire.codec import encode
from phalanx.wire.messages import ANY_EPOCH, Message, RankCall, RankConfig
from phalanx.worker.worker_runtime import WorkerRuntime


def empty_runtime() -> WorkerRuntime:
    """Return a runtime whose worker was not made yet."""
    return WorkerRuntime(InlineServices(SlotInfo("n", "h", "127.0.0.1", (), 1), ""))


def runtime_of(cls: type) -> WorkerRuntime:
    """Return the runtime of a single rank."""
    made = empty_runtime()
    config = RankConfig(0, 1, 0, 1, "g", 0, {})
    made.setup(config.pack(pickle.dumps(encode({"": (cls, (), {})}))), ())
    return made


def message(method: str, *, keep: bool = True) -> Message:
    """Return a call without arguments."""
    return RankCall(ANY_EPOCH, "", method, keep).pack()
