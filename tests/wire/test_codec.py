"""Encoded values keep types, dtypes, attributes and aliasing; other values are refused."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.errors import DispatchError, InternalError
from phalanx.wire.codec import decode, decoding, encode
from phalanx.wire.pack import Sink
from tests.wire.routes import Pair, Token, by_every_route, payload, through_buffers, through_bytes


class Tagged(torch.Tensor):
    pass


class WithOwnReduce(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.zeros, (7,)


@by_every_route
@pytest.mark.parametrize(
    "value",
    [
        ((), {}),
        [1, [2, [3, [4, [5, [6, {"deep": ({},)}]]]]]],
        {"set": {1, 2}, "frozen": frozenset("ab")},
        Pair(1, [2]),
        OrderedDict(a=1, b=2),
        1 + 2j,
        np.float32(2.5),
        bytearray(b"x"),
        HTTPStatus.OK,
        b"\x80 looks like a pickle",
        b"PHX2 looks like an encoded value",
    ],
    ids=repr,
)
def test_a_plain_value_arrives_equal_and_of_the_same_type(route: Any, value: Any) -> None:
    arrived = route(value)
    assert (type(arrived), arrived) == (type(value), value)


def test_a_lambda_is_sent_with_its_tensors_out_of_band() -> None:
    weights = torch.arange(1000.0)
    encoded = encode(lambda x: x + weights)
    assert torch.equal(decode(encoded.to_bytes())(1), weights + 1)
    assert payload(encoded) == weights.nbytes


@by_every_route
def test_long_and_recursive_lists_arrive_next_to_tensors(route: Any) -> None:
    texts: list[Any] = [f"text {i}" for i in range(20_000)]
    itself: list[Any] = [1]
    itself.append(itself)
    arrived = route({"texts": texts, "t": torch.ones(2), "itself": itself})
    assert arrived["texts"] == texts
    assert arrived["itself"][1] is arrived["itself"]


def test_an_empty_call_is_encoded_as_a_plain_pickle() -> None:
    assert encode(((), {})).to_bytes() == pickle.dumps(((), {}), 5)


DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
QUANTIZED = {"torch.qint8", "torch.qint32", "torch.quint8", "torch.quint4x2", "torch.quint2x4"}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPES.keys() - QUANTIZED))
def test_every_dtype_arrives_bit_for_bit(name: str) -> None:
    dtype = DTYPES[name]
    sent = (
        torch.arange(1, 33, dtype=torch.uint8).view(dtype) if dtype is not torch.bool else torch.eye(4).bool()
    )
    arrived = through_bytes(sent)
    assert arrived.dtype == dtype
    assert arrived.view(torch.uint8).tolist() == sent.view(torch.uint8).tolist()


def test_conjugate_and_negative_bits_are_resolved() -> None:
    sent = torch.tensor([1 + 2j, 3 - 4j]).conj()
    arrived, imag = through_bytes((sent, sent.imag))
    assert not arrived.is_conj()
    assert torch.equal(arrived, sent.resolve_conj())
    assert torch.equal(imag, sent.imag.resolve_neg())


@by_every_route
def test_a_parameter_arrives_as_a_parameter_with_its_attributes(route: Any) -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    frozen.partition_dim = 1  # pyright: ignore[reportAttributeAccessIssue]
    arrived = route([torch.nn.Parameter(torch.ones(2)), frozen])
    assert [(type(p), p.requires_grad) for p in arrived] == [
        (torch.nn.Parameter, True),
        (torch.nn.Parameter, False),
    ]
    assert arrived[1].partition_dim == 1


def test_a_tensor_subclass_keeps_type_and_attributes_unless_it_pickles_itself() -> None:
    sent = torch.zeros(1000).as_subclass(Tagged)[:3]
    sent.tag = "x"  # pyright: ignore[reportAttributeAccessIssue]
    encoded = encode(sent)
    arrived = decode(encoded)
    assert (type(arrived), arrived.tag, arrived.shape, payload(encoded)) == (Tagged, "x", (3,), 12)
    assert through_bytes(torch.ones(2).as_subclass(WithOwnReduce)).shape == (7,)


def test_a_jagged_nested_tensor_arrives_with_its_values_out_of_band() -> None:
    sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    encoded = encode(sent)
    arrived = decode(encoded.to_bytes())
    assert [part.tolist() for part in arrived.unbind()] == [[1, 1], [0, 0, 0]]
    assert payload(encoded) >= 5 * 4


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantize", "ignore:TypedStorage")
def test_sparse_quantized_and_meta_tensors_keep_their_layout_and_device() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(10), 0.1, 0, torch.quint8)[:4]
    sent = (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), quantized)
    *arrived, meta = through_buffers((*sent, torch.empty(5, 2, device="meta")))
    assert [each.layout for each in arrived] == [each.layout for each in sent]
    assert [each.to_dense().tolist() for each in arrived[:2]] == [torch.eye(3).tolist()] * 2
    assert torch.equal(arrived[2].int_repr(), quantized.int_repr())
    assert meta.is_meta


def test_encoding_does_not_change_a_value_and_its_tensors_can_still_grow() -> None:
    sent = torch.nn.Linear(3, 3)
    before = (sent.weight.data_ptr(), sent.weight._version, sent.weight.tolist(), dict(sent.__dict__))
    through_bytes([sent, sent.weight.detach()])
    assert (sent.weight.data_ptr(), sent.weight._version, sent.weight.tolist(), dict(sent.__dict__)) == before
    assert sent.weight.detach().resize_(1000).shape == (1000,)


STRUCTURED = np.dtype([("x", "<i4"), ("y", "u1")])


def test_fields_and_memory_maps_arrive_as_plain_arrays_and_dtypes_keep_metadata(tmp_path: Any) -> None:
    table = np.zeros(50, dtype=STRUCTURED)  # 5 bytes per row, 4 of them in x
    table["x"] = np.arange(50)
    encoded = encode(table["x"])
    assert (decode(encoded).tolist(), payload(encoded)) == (list(range(50)), 200)

    noted = np.dtype("i2", metadata={"unit": "m"})
    decode(encode(np.zeros(2, "i2")))  # an equal dtype without metadata
    assert decode(encode(np.zeros(2, noted))).dtype.metadata == {"unit": "m"}

    mapped = np.memmap(tmp_path / "data", dtype=np.int32, mode="w+", shape=(100,))
    mapped[:] = 3
    encoded = encode(mapped[:10])
    arrived = decode(encoded)
    assert (type(arrived), arrived.tolist(), payload(encoded)) == (np.ndarray, [3] * 10, 40)


def test_arrow_tables_are_sent_out_of_band() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"x": np.arange(1000)})
    encoded = encode({"table": table, "t": torch.ones(3)})
    arrived = decode(encoded.to_bytes())
    assert payload(encoded) >= 8000
    assert arrived["table"].equals(table)
    assert arrived["t"].tolist() == [1, 1, 1]


def test_temporary_tensors_made_while_pickling_are_not_confused() -> None:
    class Computed:
        def __reduce__(self) -> Any:
            return list, ([torch.arange(10.0)[::2] + i for i in range(50)],)

    arrived = through_bytes(Computed())
    assert [part[0].item() for part in arrived] == list(range(50))


def test_the_encoder_keeps_sources_alive_so_that_their_addresses_stay_unique() -> None:
    sink, owner = Sink(), torch.ones(3)
    sink.place_of(owner, torch.device("cuda", 0), 4096, 12, lambda: np.zeros(12, np.uint8))
    kept = weakref.ref(owner)
    del owner
    assert kept() is not None


def test_small_tensors_and_partly_overlapping_views_arrive_in_separate_memory() -> None:
    sent = [*(torch.full((3,), float(i)) for i in range(50)), *(np.full(3, i, np.int16) for i in range(50))]
    arrived = decode(encode(sent))
    assert all((got == want).all() for got, want in zip(arrived, sent, strict=True))
    assert {got.untyped_storage().nbytes() for got in arrived[:50]} == {12}
    arrived[0].resize_(1000).zero_()
    arrived[50][:] = -1
    assert (arrived[1][0], arrived[51][0]) == (1.0, 1)

    tensor = torch.zeros(4)
    first, second = through_bytes((tensor[:3], tensor[1:]))
    first.fill_(1)
    assert second.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [2, 2000])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_tensors_and_arrays_over_the_same_bytes_are_sent_once_and_share_memory(first: int, rows: int) -> None:
    tensor = torch.arange(3.0 * rows).reshape(rows, 3)
    views = [tensor, tensor.numpy(), tensor.T, tensor.detach(), tensor.view(torch.int32)]
    sent = views[first:] + views[:first]
    encoded = encode(sent)
    arrived = decode(encoded)
    assert payload(encoded) == tensor.nbytes
    assert [type(each) for each in arrived] == [type(each) for each in sent]
    assert [tuple(each.shape) for each in arrived] == [tuple(each.shape) for each in sent]
    arrived[0][0, 0] = 9
    assert all(each[0, 0] != 0 for each in arrived)


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    note: str


LOCK = threading.Lock()


def uses_a_global() -> Any:
    return LOCK


uses_a_global.__module__ = "__main__"  # sent by value, as the functions of a script are
ODD = type("Odd", (), {"itself": lambda self: ODD, "method": uses_a_global})


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ((({"lock": LOCK},), {}), "args[0]['lock']"),
        (((1,), {"x": [0, (LOCK,)]}), "kwargs['x'][1][0]"),
        ((LOCK,), "value[0]"),
        ({"h": SimpleNamespace(inner={"lock": LOCK})}, "value['h'].inner['lock']"),
        (Batch(torch.ones(1), LOCK), "value.note"),  # pyright: ignore[reportArgumentType]
        ([uses_a_global], "value[0] (uses 'LOCK')"),
        ([lambda lock=LOCK: lock], "value[0] (uses 'lock')"),
        ([ODD], "value[0] (class Odd).method (uses 'LOCK')"),
        (LOCK, "the value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_object_that_cannot_be_pickled_is_named_with_type_and_place(value: Any, place: str) -> None:
    with pytest.raises(DispatchError) as caught:
        encode(value)
    text = str(caught.value)
    assert text.startswith(f"{place} cannot be sent: an object of type _thread.lock cannot be pickled")


def test_errors_of_pickling_are_dispatch_errors_and_foreign_bytes_are_refused() -> None:
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
import phalanx.collect.join, phalanx.dispatch.modes
from phalanx.wire.codec import decode, encode
decode(encode((torch.ones(2), numpy.ones(2), lambda: 1)).to_bytes())
sys.exit(before != state() or not {"ray", "tensordict", "pyarrow", "transformers"}.isdisjoint(sys.modules))
"""


def test_encoding_patches_no_global_state_and_planning_imports_no_optional_package() -> None:
    assert subprocess.run([sys.executable, "-c", UNPATCHED], check=False).returncode == 0


def test_a_tensordict_keeps_its_structure_and_has_the_device_of_its_tensors() -> None:
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
    with decoding(device=torch.device("meta")):
        moved = decode(encode(sent.to("cpu").lock_()))
    assert {moved.device.type, moved["inner"].device.type, moved["ids"].device.type} == {"meta"}
    assert (moved.is_locked, decode(encode(moved)).device.type, arrived.device) == (True, "meta", None)
