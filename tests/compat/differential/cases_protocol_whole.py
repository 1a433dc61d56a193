"""DataProto as a whole: repeated, padded, folded, iterated, described."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import numpy as np
import ray  # noqa: F401 - references count among what can be joined where Ray is in use
import torch
from batches import DataProto, batch, protocol
from plain import attempt, plain
from tensordict import TensorDict

ABSENT = "an absent part of a DataProto is like one without keys; verl fails inside"
OWN = "what a method returns has dicts of its own, so that changing them does not change the caller's batch"
MESSAGE = "wrong input is refused with a message (an AssertionError), where verl fails inside"
UNCHANGED = "folding does not reshape the arrays of the batch that is folded; verl's does"
DTYPE = "columns of numbers keep their dtype in mini-batches; verl's become objects"
INTENDED = {
    "case_reorder_and_repeat/reorder list": "lists and arrays are taken as indices, as in select_idxs",
    "case_reorder_and_repeat/reorder array": "lists and arrays are taken as indices, as in select_idxs",
    "case_reorder_and_repeat/reorder without tensors": ABSENT,
    "case_reorder_and_repeat/meta shared": OWN,
    "case_reorder_and_repeat/sample level fewer": MESSAGE,
    "case_reorder_and_repeat/column chunks of all*": "without split_keys all columns are repeated; verl fails",
    "case_reorder_and_repeat/column chunks uneven": MESSAGE,
    "case_padding/zero divisor": MESSAGE,
    "case_folding/fold sizes": UNCHANGED,
    "case_folding/back*": UNCHANGED,
    "case_folding/unfold flat": UNCHANGED,
    "case_folding/folded element": UNCHANGED,
    "case_folding/meta": OWN,
    "case_collating/no items": MESSAGE,
    "case_collating/without tensors": ABSENT,
    "case_iterating/usual": DTYPE,
    "case_iterating/epochs": DTYPE,
    "case_iterating/seed*": DTYPE,
    "case_iterating/whole": DTYPE,
    "case_iterating/drop last": DTYPE,
    "case_iterating/without tensors": ABSENT,
    "case_describing/info of *": ABSENT,
    "case_batch_data/mixed list": "every element is looked at, not only the first",
    "case_batch_data/ch* number": MESSAGE,
    "case_batch_data/concat numbers": MESSAGE,
}


def case_reorder_and_repeat() -> Any:
    def reordered(indices: Any) -> Any:
        data = batch(3)
        given = data.reorder(indices)
        return [plain(given), plain(data)]

    data = batch(2)
    objects = DataProto.from_dict(non_tensors={"a": ["x", "y"]})
    return {
        "reorder": attempt(lambda: reordered(torch.tensor([2, 0, 1]))),
        "reorder list": attempt(lambda: reordered([2, 0, 1])),
        "reorder array": attempt(lambda: reordered(np.array([2, 0, 1]))),
        "reorder fewer": attempt(lambda: reordered(torch.tensor([2]))),
        "reorder without tensors": attempt(lambda: objects[:].reorder(torch.tensor([1, 0]))),
        "repeat": attempt(lambda: data.repeat(2)),
        "repeat default": attempt(lambda: data.repeat()),
        "repeat blocks": attempt(lambda: data.repeat(2, interleave=False)),
        "repeat zero": attempt(lambda: data.repeat(0)),
        "repeat once": attempt(lambda: data.repeat(1)),
        "repeat without tensors": attempt(lambda: objects.repeat(2)),
        "repeat blocks without tensors": attempt(lambda: objects.repeat(2, False)),
        "meta shared": data.repeat(2).meta_info is data.meta_info,
        "sample level": attempt(lambda: data.sample_level_repeat([1, 3])),
        "sample level tensor": attempt(lambda: data.sample_level_repeat(torch.tensor([1, 0]))),
        "sample level array": attempt(lambda: data.sample_level_repeat(np.array([2, 1]))),
        "sample level tuple": attempt(lambda: data.sample_level_repeat((2, 1))),
        "sample level number": attempt(lambda: data.sample_level_repeat(2)),
        "sample level fewer": attempt(lambda: data.sample_level_repeat([2])),
        "sample level two dims": attempt(
            lambda: data.sample_level_repeat(torch.ones(2, 1, dtype=torch.int64))
        ),
        "sample level without tensors": attempt(lambda: objects.sample_level_repeat([2, 1])),
        "column chunks": attempt(lambda: data.unfold_column_chunks(2, split_keys=["obs"])),
        "column chunks of all": attempt(lambda: data.unfold_column_chunks(1)),
        "column chunks of all, two": attempt(lambda: data.unfold_column_chunks(2)),
        "column chunks uneven": attempt(lambda: data.unfold_column_chunks(3, split_keys=["obs"])),
        "column chunks of arrays": attempt(
            lambda: DataProto.from_dict(
                {"a": torch.arange(8).reshape(2, 4)}, {"b": np.arange(8).reshape(2, 4), "c": ["x", "y"]}
            ).unfold_column_chunks(2, ["a", "b"])
        ),
        "column chunks wide": attempt(
            lambda: DataProto.from_dict(
                {"a": torch.arange(16).reshape(2, 4, 2), "b": torch.arange(2)}
            ).unfold_column_chunks(2, ["a"])
        ),
        "column chunks unknown key": attempt(lambda: data.unfold_column_chunks(2, ["nope"])),
        "column chunks without tensors": attempt(lambda: objects.unfold_column_chunks(2, [])),
    }


def case_padding() -> Any:
    pad, unpad = protocol.pad_dataproto_to_divisor, protocol.unpad_dataproto

    def padded(**arguments: Any) -> Any:
        data = batch(3)
        given = data.padding(**arguments)
        return [plain(given), plain(data)]

    def with_switch() -> Any:
        config = protocol.DataProtoConfig
        before = config.auto_padding
        config.auto_padding = True
        try:
            return [before, config.auto_padding, batch(3).is_padding_enabled(), plain(batch(3).chunk(2))]
        finally:
            config.auto_padding = before

    def unchanged() -> Any:
        data = batch(3)
        pad(data, 2)
        return plain(data)

    objects = DataProto.from_dict(non_tensors={"a": ["x", "y", "z"]})
    return {
        "to divisor": attempt(lambda: pad(batch(3), 2)),
        "to a larger divisor": attempt(lambda: pad(batch(2), 7)),
        "nothing to do": attempt(lambda: pad(batch(4), 2)),
        "nothing to do is itself": (lambda data: pad(data, 2)[0] is data)(batch(4)),
        "caller unchanged": attempt(unchanged),
        "not a DataProto": attempt(lambda: pad([1, 2, 3], 2)),
        "zero divisor": attempt(lambda: pad(batch(3), 0)),
        "empty": attempt(lambda: pad(batch(3)[0:0], 2)),
        "without tensors": attempt(lambda: pad(objects, 2)),
        "back": attempt(lambda: unpad(*pad(batch(3), 2))),
        "back without padding": (lambda data: unpad(data, 0) is data)(batch(2)),
        "method": attempt(lambda: padded(padding_size=2)),
        "method, last": attempt(lambda: padded(padding_size=1, padding_candidate="last")),
        "method, first": attempt(lambda: padded(padding_size=1, padding_candidate="first")),
        "method, zero": attempt(lambda: padded(padding_size=0)),
        "method, other candidate": attempt(lambda: padded(padding_size=1, padding_candidate="middle")),
        "method, more than rows": attempt(lambda: padded(padding_size=5)),
        "method without tensors": attempt(lambda: (lambda d: (d.padding(1), d)[1])(objects[:])),
        "enabled": batch(2).is_padding_enabled(),
        "enabled by meta": attempt(
            lambda: DataProto.from_dict({"a": torch.ones(1)}, auto_padding=True).is_padding_enabled()
        ),
        "enabled by a dict": attempt(
            lambda: DataProto.from_single_dict({"a": torch.ones(1)}, auto_padding=True).meta_info
        ),
        "key": protocol.DataProtoConfig.auto_padding_key,
        "size key": protocol._padding_size_key,
        "switch": attempt(with_switch),
        "switch by environment": attempt(environment_switch),
        "switch must be a bool": attempt(lambda: setattr(protocol.DataProtoConfig, "auto_padding", 1)),
    }


def environment_switch() -> Any:
    found = []
    for value in ("1", "TRUE", "true", "0", ""):
        os.environ["VERL_AUTO_PADDING"] = value
        found.append(protocol.DataProtoConfig.auto_padding)
    del os.environ["VERL_AUTO_PADDING"]
    return [*found, protocol.DataProtoConfig.auto_padding]


def case_folding() -> Any:
    data = batch(6)
    fold, unfold = protocol.fold_batch_dim, protocol.unfold_batch_dim
    return {
        "fold": attempt(lambda: fold(data, 2)),
        "fold sizes": attempt(lambda: list(fold(data, 3).batch.batch_size)),
        "fold uneven": attempt(lambda: fold(data, 4)),
        "back": attempt(lambda: unfold(fold(data, 2))),
        "back sizes": attempt(lambda: list(unfold(fold(data, 2)).batch.batch_size)),
        "unfold flat": attempt(lambda: unfold(data)),
        "unfold three": attempt(
            lambda: unfold(DataProto.from_dict({"a": torch.arange(8).reshape(2, 2, 2)}, num_batch_dims=3), 3)
        ),
        "folded rows": attempt(lambda: len(fold(data, 2))),
        "folded element": attempt(lambda: fold(data, 2)[0]),
        "meta": attempt(lambda: fold(data, 2).meta_info is data.meta_info),
    }


def case_collating() -> Any:
    data = batch(3)
    return {
        "items": attempt(lambda: protocol.collate_fn([data[0], data[2]])),
        "no items": attempt(lambda: protocol.collate_fn([])),
        "without tensors": attempt(
            lambda: protocol.collate_fn([DataProto.from_dict(non_tensors={"a": ["x"]})[0]] * 2)
        ),
        "objects": attempt(
            lambda: protocol.collate_fn(
                [
                    protocol.DataProtoItem(TensorDict({"a": torch.tensor(i)}, []), {"x": [i]}, {"m": i})
                    for i in range(2)
                ]
            )
        ),
    }


def case_iterating() -> Any:
    def batches(*arguments: Any, **keywords: Any) -> Any:
        return [plain(part) for part in batch(4).make_iterator(*arguments, **keywords)]

    def state_untouched() -> Any:
        torch.manual_seed(5)
        before = torch.rand(1)
        torch.manual_seed(5)
        list(batch(4).make_iterator(2, 1, seed=1))
        return torch.equal(before, torch.rand(1))

    return {
        "usual": attempt(lambda: batches(2, 1)),
        "epochs": attempt(lambda: batches(2, 2)),
        "seeded": attempt(lambda: batches(2, 2, seed=7, dataloader_kwargs={"shuffle": True})),
        "seed alone": attempt(lambda: batches(2, 1, seed=7)),
        "uneven": attempt(lambda: batches(3, 1)),
        "whole": attempt(lambda: batches(4, 1)),
        "drop last": attempt(lambda: batches(2, 1, dataloader_kwargs={"drop_last": True})),
        "lazy": type(batch(4).make_iterator(2, 1)).__name__ in ("generator", "_Iterator"),
        "global state": attempt(state_untouched),
        "meta": attempt(lambda: [part.meta_info for part in batch(4).make_iterator(2, 1)]),
        "type": attempt(lambda: type(next(iter(batch(4).make_iterator(2, 1)))).__name__),
        "without tensors": attempt(
            lambda: [plain(p) for p in DataProto.from_dict(non_tensors={"a": list("xy")}).make_iterator(1, 1)]
        ),
        "zero epochs": attempt(lambda: batches(2, 0)),
    }


def case_describing() -> Any:
    def printed() -> Any:

        sink = io.StringIO()
        with contextlib.redirect_stdout(sink):
            batch(2).print_size("here:")
            DataProto.from_dict(non_tensors={"a": ["x"]}).print_size()
        return sink.getvalue()

    held = DataProto.from_dict(
        {"a": torch.ones(2, 3)},
        {"b": ["x", "y"], "c": np.arange(2)},
        {"m": {"x": [1, 2]}, "t": torch.ones(2), "e": [], "f": 1.5, "u": (1, 2)},
    )
    return {
        "info": attempt(lambda: held.get_data_info()),
        "info of nothing": attempt(lambda: DataProto().get_data_info()),
        "info of arrays": attempt(
            lambda: DataProto(
                None, {"r": np.array([np.arange(2), np.arange(3)], dtype=object)}
            ).get_data_info()
        ),
        "size": attempt(printed),
        "consistency": attempt(lambda: batch(2).check_consistency()),
        "device": attempt(lambda: batch(2).to("cpu")),
        "device is itself": (lambda data: data.to("cpu") is data)(batch(2)),
        "device without tensors": attempt(lambda: DataProto().to("cpu")),
        "repr": attempt(lambda: type(repr(batch(1))).__name__),
    }


def case_batch_data() -> Any:
    of = protocol.BatchData
    held = TensorDict({"a": torch.arange(4)}, [4])
    return {
        "proto": attempt(lambda: [of(batch()).is_chunkable(), of(batch()).is_concatable()]),
        "tensordict": attempt(lambda: [of(held).is_chunkable(), of(held).is_concatable()]),
        "list of protos": attempt(lambda: [of([batch()]).is_chunkable(), of([batch()]).is_concatable()]),
        "list of tensordicts": attempt(lambda: [of([held]).is_chunkable(), of([held]).is_concatable()]),
        "empty list": attempt(lambda: [of([]).is_chunkable(), of([]).is_concatable()]),
        "number": attempt(lambda: [of(1).is_chunkable(), of(1).is_concatable()]),
        "tensor": attempt(lambda: [of(torch.ones(2)).is_chunkable(), of(torch.ones(2)).is_concatable()]),
        "mixed list": attempt(lambda: [of([batch(), 1]).is_chunkable(), of([batch(), 1]).is_concatable()]),
        "numbers": attempt(lambda: [of([1, 2]).is_concatable(), of((batch(), batch())).is_concatable()]),
        "chunk": attempt(lambda: of(batch()).chunk(2)),
        "chunk tensordict": attempt(lambda: of(held).chunk(2)),
        "chunk number": attempt(lambda: of(1).chunk(2)),
        "concat": attempt(lambda: of([batch(1), batch(1)]).concat()),
        "concat tensordicts": attempt(lambda: of([held, held]).concat()),
        "concat numbers": attempt(lambda: of([1, 2]).concat()),
        "concat nothing": attempt(lambda: of([]).concat()),
        "data": attempt(lambda: of(3).data),
        "chunkable types": attempt(lambda: sorted(kind.__name__ for kind in of._chunkable_types())),
        "concatable types": attempt(lambda: sorted(kind.__name__ for kind in of._concatable_types())),
    }
