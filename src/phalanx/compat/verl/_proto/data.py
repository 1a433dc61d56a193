"""`DataProto`: a batch of rows, held as tensors and as arrays of objects, with facts about the whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from phalanx.compat.verl._proto import columns, info, parts, state, tensors
from phalanx.compat.verl._proto.config import DataProtoConfig
from phalanx.compat.verl._proto.errors import require
from phalanx.compat.verl._proto.iterate import iterate, require_whole
from phalanx.compat.verl._proto.meta import join_meta, require_union_of_meta
from phalanx.compat.verl.utils.device import torch_device_of

_HOME = "phalanx.compat.verl.protocol"  # where pickles find the classes, and importing which registers them


@dataclass
class DataProtoItem:
    """One row of a `DataProto`: ``batch`` without batch dims, and an object in place of each array."""

    __module__ = _HOME

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """Rows of a batch.

    ``batch`` holds tensors (also nested ones) whose dim 0 are the rows, ``non_tensor_batch`` numpy arrays with as
    many rows, mostly of objects, and ``meta_info`` what is true of the whole batch. Either of the first two
    may be absent, also as None. What a method returns has a ``meta_info`` dict of its own; rows may share memory.

    Raises:
        Refused: (an AssertionError) the parts do not have the same rows.
    """

    __module__ = _HOME

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, columns.Array] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    def check_consistency(self) -> None:
        """Refuse parts that do not have the same rows."""
        if self.batch is None:
            return
        dims = tuple(self.batch.batch_size)
        require(
            len(dims) == 1,
            f"only support num_batch_dims=1, but batch has batch size {dims}: expected one batch dim, the rows",
        )
        for key, column in self.non_tensor_batch.items():
            is_array = isinstance(column, np.ndarray)
            require(
                is_array,
                "data in the non_tensor_batch must be a numpy.array with dtype=object, but for "
                f"key={key!r}, got type(val)={type(column)!r}",
            )
            rows = column.shape[0] if column.ndim else None
            require(rows == dims[0], f"key {key} length {rows} is not equal to batch size {dims[0]}")

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """From tensors and arrays under their keys.

        Raises:
            ValueError: a value is neither a tensor nor an array.
        """
        held, arrays = parts.by_kind(data)
        return cls.from_dict(held, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """From tensors, and from arrays or lists of objects.

        A list becomes an array of objects: lists of one length in it become further dims of that array.
        ``auto_padding`` lets calls split the rows over any number of ranks.

        Raises:
            Refused: rows differ, or more than one batch dim is asked for.
        """
        parts.require_one_batch_dim(num_batch_dims, non_tensors is not None, "non_tensors is not None")
        batch = parts.tensor_dict(tensors, num_batch_dims) if tensors else None
        arrays = {key: columns.as_column(value) for key, value in (non_tensors or {}).items()}
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(batch, arrays, meta)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """From a TensorDict: objects by row become arrays, values of the whole batch go to ``meta_info``.

        Raises:
            Refused: it is none, or another number of batch dims than 1 is asked for.
        """
        require(
            isinstance(tensor_dict, TensorDict),
            f"expected a TensorDict, but got {type(tensor_dict).__name__}",
        )
        objects = not all(isinstance(value, torch.Tensor) for value in tensor_dict.values())
        parts.require_one_batch_dim(num_batch_dims, objects, "tensor_dict contains non tensor data")
        require(num_batch_dims == 1, f"only support num_batch_dims=1, but got {num_batch_dims}")
        batch, arrays, values = tensors.taken_apart(tensor_dict)
        return cls(batch, arrays, {**(meta_info or {}), **values})

    def to_tensordict(self) -> TensorDict:
        """All of it in one TensorDict: arrays as objects by row, ``meta_info`` as values of the whole batch.

        Raises:
            Refused: a key is in two of the parts.
        """
        batch = TensorDict({}, [len(self)]) if self.batch is None else self.batch
        return tensors.put_together(batch, self.non_tensor_batch, self.meta_info)

    def __len__(self) -> int:
        if self.batch is not None:
            return tensors.row_count(self.batch)
        first = next(iter(self.non_tensor_batch.values()), None)
        return 0 if first is None else first.shape[0]

    def __getitem__(self, item: Any) -> Any:
        """A `DataProtoItem` for an int; a `DataProto` for a slice, or a list, array or tensor of numbers or booleans.

        Raises:
            TypeError: ``item`` is anything else.
            IndexError: it is beyond the rows.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            row = int(item)
            batch = None if self.batch is None else self.batch[row]
            return DataProtoItem(batch, columns.take(self.non_tensor_batch, row), self.meta_info)
        raise TypeError(
            f"Indexing with {type(item)} is not supported: a DataProto is indexed by an int, a slice, or a list, array "
            "or tensor of rows; columns are in .batch and .non_tensor_batch"
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start`` to ``end``; without a step they are views."""
        first, stop, every = slice(start, end, step).indices(len(self))
        if every != 1:
            if every < 0:
                raise ValueError(f"step is {step}: expected a positive one; reverse with select_idxs")
            return self.select_idxs(list(range(first, stop, every)))
        stop = max(first, stop)
        batch = None if self.batch is None else tensors.slice_rows(self.batch, first, stop)
        return self._like(batch, columns.take(self.non_tensor_batch, slice(first, stop)))

    def select_idxs(self, idxs: tensors.Rows) -> DataProto:
        """Rows by number or by a mask, as copies."""
        indices = tensors.as_indices(idxs, len(self))
        batch = None if self.batch is None else tensors.take_rows(self.batch, indices)
        return self._like(batch, columns.take(self.non_tensor_batch, indices.cpu().numpy()))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The chosen keys of each part; None chooses all, and keys that the latter two lack are passed over.

        Raises:
            KeyError: ``batch`` has not all of ``batch_keys``.
        """
        batch = self.batch
        if batch_keys is not None and (batch is not None or batch_keys):
            batch = parts.require_batch(batch, batch_keys).select(*batch_keys)
        arrays = parts.chosen(self.non_tensor_batch, non_tensor_batch_keys)
        meta = parts.chosen(self.meta_info, meta_info_keys)
        chosen = type(self)(batch, arrays, meta)
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take the given keys out of this batch, as another.

        Raises:
            Refused: a key is not there; nothing is taken out then.
        """
        parts.require_keys("batch", () if self.batch is None else self.batch.keys(), batch_keys)
        parts.require_keys("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        parts.require_keys("meta_info", self.meta_info, meta_info_keys)
        batch = None
        if batch_keys and self.batch is not None:
            batch = self.batch.select(*batch_keys)
            self.batch = self.batch.exclude(*batch_keys)
        arrays = {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()}
        return type(self)(batch, arrays, {key: self.meta_info.pop(key) for key in meta_info_keys or ()})

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> DataProto:
        """This batch with keys of ``batch`` renamed in place, one or a list of them.

        Raises:
            TypeError: keys are neither a string nor a list.
            ValueError: there are not as many new keys as old ones.
            KeyError: an old key is not there.
        """
        self.batch = parts.renamed(self.batch, parts.as_keys(old_keys), parts.as_keys(new_keys))
        return self

    def union(self, other: DataProto) -> DataProto:
        """This batch, changed in place: with what ``other`` has besides.

        Raises:
            Refused: row counts differ, or both have a key with other values; nothing is changed then.
        """
        if self.batch is not None and other.batch is not None:
            tensors.require_union(self.batch, other.batch)
        columns.require_union(self.non_tensor_batch, other.non_tensor_batch)
        require_union_of_meta(self.meta_info, other.meta_info)
        batch = other.batch if self.batch is None else self.batch
        both = type(self)(batch, {**self.non_tensor_batch, **other.non_tensor_batch})
        if self.batch is not None and other.batch is not None:
            tensors.union_tensor_dict(self.batch, other.batch)
        self.batch = both.batch
        self.non_tensor_batch.update(both.non_tensor_batch)
        self.meta_info.update(other.meta_info)
        return self

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches, all rows once per epoch, in the order of ``torch.utils.data.DataLoader``.

        ``seed`` and ``dataloader_kwargs`` (such as ``{"shuffle": True}``) are for that.

        Raises:
            Refused: the rows do not fill whole mini-batches.
        """
        require_whole(len(self), mini_batch_size)
        return iterate(len(self), self.select_idxs, mini_batch_size, epochs, seed, dataloader_kwargs)

    def to(self, device: Any) -> DataProto:
        """This batch with its tensors on ``device``, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(torch_device_of(device))
        return self

    def is_padding_enabled(self) -> bool:
        """Whether calls may pad this batch: it says so itself, or all do (``DataProtoConfig.auto_padding``)."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key) or DataProtoConfig.auto_padding)

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of the last row, or of the first if the candidate is ``"first"``."""
        if padding_size == 0:
            return
        rows = len(self)
        require(rows, "a DataProto without rows cannot be padded, because padding repeats a row")
        row = 0 if padding_candidate == "first" else rows - 1
        padded = self.select_idxs([*range(rows), *[row] * padding_size])
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """The rows in ``chunks`` pieces, in order, as views.

        With padding enabled they may be uneven: like those of ``torch.chunk`` where that gives ``chunks`` many,
        otherwise sizes differ by at most one.

        Raises:
            Refused: the rows do not divide evenly, and padding is not enabled.
        """
        pieces = parts.spans(
            len(self),
            chunks,
            self.is_padding_enabled(),
            f"only support equal chunk. Got size of DataProto {len(self)} and chunk {chunks}. Pad it with "
            "pad_dataproto_to_divisor, or make it with auto_padding=True",
        )
        return [self.slice(start, stop) for start, stop in pieces]

    def split(self, split_size: int) -> list[DataProto]:
        """Pieces of ``split_size`` rows, the last one with what is left."""
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all, in order.

        ``meta_info`` is that of all together. Under ``metrics`` (a dict, or a list of dicts) each value becomes the
        list of the values of all.

        Raises:
            Refused: there are none, their parts or columns differ, or a key of ``meta_info`` has several values.
            KeyError: the keys of their tensors differ.
        """
        require(data, "there is nothing to concatenate: give at least one DataProto")
        batches = [one.batch for one in data if one.batch is not None]
        require(
            len(batches) in (0, len(data)),
            f"{len(data) - len(batches)} of {len(data)} batches have no tensors: expected tensors in all or none",
        )
        batch = tensors.join_rows(batches) if batches else None
        arrays = columns.join([one.non_tensor_batch for one in data])
        return type(data[0])(batch, arrays, join_meta([one.meta_info for one in data]))

    def reorder(self, indices: tensors.Rows) -> None:
        """Put the rows in the order of ``indices``, in place."""
        chosen = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = chosen.batch, chosen.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row ``repeat_times`` in a row (``interleave``), or all rows that often over."""
        rows = torch.arange(len(self))
        return self.select_idxs(
            rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        )

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Row ``i`` ``repeat_times[i]`` in a row; a list, tuple, array or tensor of one number per row."""
        counts = columns.repeat_counts(repeat_times, len(self))
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(counts.cpu()))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """``n_split`` rows out of each: dim 1 of the columns in ``split_keys`` is dealt out, others are repeated.

        Raises:
            Refused: dim 1 of such a column does not divide by ``n_split``.
        """
        batch, arrays = self.repeat(n_split), self.non_tensor_batch
        for key in split_keys or ():
            held = self.batch.get(key, None) if self.batch is not None else None
            if held is not None and batch.batch is not None:
                batch.batch.set(key, parts.unfolded(key, held, n_split))
            elif key in arrays:
                batch.non_tensor_batch[key] = parts.unfolded(key, arrays[key], n_split)
        return batch

    def save_to_disk(self, filepath: str | Path) -> None:
        """Pickle this batch into a file."""
        state.save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """The batch in a file made by `save_to_disk`. Unpickling runs code: load only files that you trust."""
        return state.load(filepath)

    def print_size(self, prefix: str = "") -> None:
        """Print the size of the tensors and of the arrays (of objects: of the references) in GB."""
        print(info.sizes(self.batch, self.non_tensor_batch, prefix))  # noqa: T201  as verl's does

    def get_data_info(self) -> str:
        """Shapes and types of everything, one line each."""
        return info.described(self.batch, self.non_tensor_batch, self.meta_info)

    def __getstate__(self) -> tuple[Any, ...]:
        return state.packed(self.batch), self.non_tensor_batch, self.meta_info

    def __setstate__(self, data: tuple[Any, ...]) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = state.unpacked(data[0]), data[1], data[2]

    def __copy__(self) -> DataProto:
        return type(self)(self.batch, self.non_tensor_batch, self.meta_info)

    def _like(self, batch: TensorDict | None, arrays: columns.Columns) -> DataProto:
        return type(self)(batch, arrays, dict(self.meta_info))
