"""What the codec refuses, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from phalanx.errors import DispatchError, InternalError
from phalanx.wire.codec import decode, encode
from tests.wire.routes import Token, payload, through_buffers


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    note: str


class Holder:
    def __init__(self) -> None:
        self.inner = {"lock": threading.Lock()}


LOCK = threading.Lock()


def uses_a_global() -> Any:
    return LOCK


uses_a_global.__module__ = "__main__"  # sent by value, as the functions of a script are


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ((({"lock": LOCK},), {}), "args[0]['lock']"),
        (((1,), {"x": [0, (LOCK,)]}), "kwargs['x'][1][0]"),
        ((LOCK,), "value[0]"),
        ({"h": Holder()}, "value['h'].inner['lock']"),
        (Batch(torch.ones(1), LOCK), "value.note"),  # pyright: ignore[reportArgumentType]
        ([uses_a_global], "value[0] (uses 'LOCK')"),
        ([lambda lock=LOCK: lock], "value[0] (uses 'lock')"),
        (LOCK, "the value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_pickled_is_named_with_type_and_place(value: Any, place: str) -> None:
    with pytest.raises(DispatchError) as caught:
        encode(value)
    text = str(caught.value)
    assert text.startswith(f"{place} cannot be sent: an object of type _thread.lock cannot be pickled")


def test_errors_of_pickling_are_dispatch_errors_and_foreign_bytes_are_refused_with_advice() -> None:
    with pytest.raises(DispatchError, match=r"Token.*never travels") as caught:
        encode([Token("a")])
    assert isinstance(caught.value.__cause__, TypeError)

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DispatchError, match="recursion"):
        encode(deep)
    with pytest.raises(InternalError, match="expected an Encoded"):
        decode(b"hello world")


UNPATCHED = """
import copyreg, sys
import cloudpickle, numpy, torch

def state():
    return dict(copyreg.dispatch_table), torch.Tensor.__reduce_ex__, dict(cloudpickle.Pickler._dispatch_table)

before = state()
from phalanx.wire.codec import decode, encode
decode(encode((torch.ones(2), numpy.ones(2), lambda: 1)).to_bytes())
sys.exit(before != state() or "ray" in sys.modules or "tensordict" in sys.modules)
"""


def test_nothing_global_is_patched_and_nothing_optional_imported() -> None:
    assert subprocess.run([sys.executable, "-c", UNPATCHED], check=False).returncode == 0


def test_a_tensordict_keeps_its_structure() -> None:
    tensordict = pytest.importorskip("tensordict")
    sent = tensordict.TensorDict(
        {
            "ids": torch.arange(12).reshape(4, 3),
            "inner": tensordict.TensorDict({"x": torch.ones(4, 2)}, batch_size=[4, 2]),
            "note": tensordict.NonTensorData("hello", batch_size=[4]),
            "texts": tensordict.NonTensorStack("a", "b", "c", "d"),
        },
        batch_size=[4],
    )
    arrived = through_buffers(sent)
    assert (arrived.batch_size, arrived["inner"].batch_size) == ((4,), (4, 2))
    assert (arrived["note"], list(arrived["texts"])) == ("hello", ["a", "b", "c", "d"])
    assert torch.equal(arrived["ids"], sent["ids"])
    assert payload(encode(sent[:2].select("ids"))) == sent["ids"][:2].nbytes
