"""The worker actor without Ray: attributes of the user's object, outputs, and remote tracebacks."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import phalanx
from phalanx.backends.ray.ray_errors import remote_traceback
from phalanx.backends.ray.worker_actor import AsyncWorkerActor, WorkerActor, unpacked
from phalanx.collect.call_values import encoded

HOME = Path(phalanx.__file__).parent


def shell(kind: Any, instances: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made._runtime = SimpleNamespace(instances=instances)
    return made


@pytest.mark.parametrize("kind", [WorkerActor, AsyncWorkerActor])
def test_the_actor_has_the_attributes_of_the_users_object_once_it_was_constructed(kind: Any) -> None:
    assert shell(kind, {"": SimpleNamespace(rank=3)}).rank == 3
    with pytest.raises(AttributeError, match="_runtime"):
        _ = kind.__new__(kind)._runtime


@pytest.mark.parametrize(
    ("instances", "name"),
    [
        ({}, "rank"),
        ({"actor": SimpleNamespace(rank=3)}, "rank"),
        ({"": SimpleNamespace(__hidden__=1)}, "__hidden__"),
    ],
)
def test_a_missing_attribute_is_an_error_of_the_actor(instances: dict[str, Any], name: str) -> None:
    with pytest.raises(AttributeError, match=f"'WorkerActor' object has no attribute '{name}'"):
        getattr(shell(WorkerActor, instances), name)


@pytest.mark.parametrize(
    ("output", "is_packed"),
    [
        (None, True),
        ("text", True),
        (np.arange(6)[::2], True),
        (b"bytes", False),
        (np.ones(1 << 17, np.uint8), False),
    ],
)
def test_small_outputs_are_sent_as_bytes_and_all_arrive_as_they_were(output: Any, is_packed: bool) -> None:
    actor = shell(WorkerActor, {})
    actor._runtime.run = lambda _: encoded(output)
    sent = actor._px_call(b"message")
    (arrived,) = unpacked([pickle.loads(pickle.dumps(sent, 5))])

    assert (isinstance(sent, bytes) and sent != b"bytes") == is_packed
    np.testing.assert_equal(arrived, output)


def test_a_remote_traceback_begins_with_the_users_code() -> None:
    text = f"""\x1b[36mray::Model.work()\x1b[39m (pid=1, ip=192.0.2.2)
             ^^^^^^^^^^
  File "{HOME}/worker/direct_actor_calls.py", line 3, in run
    result = method(*args)
             ^^^^^^^^^^^^^
  File "/home/me/train.py", line 13, in work
    raise ValueError("bad")
ValueError: bad"""

    assert remote_traceback(text).splitlines() == [
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 13, in work',
        '    raise ValueError("bad")',
        "ValueError: bad",
    ]
