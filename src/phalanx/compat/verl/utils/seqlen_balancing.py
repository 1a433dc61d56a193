"""Rows dealt out such that every part has about the same total length; batches cut by their number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from phalanx.compat.verl._proto.errors import require
from phalanx.compat.verl.utils.device import get_device_name
from phalanx.compat.verl.utils.tensordict_utils import index_select_tensor_dict
from phalanx.topology.balance import balanced_partition

__all__ = [
    "calculate_workload",
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "roundup_divisible",
]

_LINEAR_COST = 24576
"""Of a transformer of hidden size 4096: per token, where attention costs 1 per pair of tokens."""


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of b that is not less than a."""
    return ceildiv(a, b) * b


def calculate_workload(seqlen_list: torch.Tensor) -> torch.Tensor:
    """Relative cost of sequences by length, for a transformer of hidden size 4096: linear layers and attention."""
    return _LINEAR_COST * seqlen_list + seqlen_list**2


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Row numbers, ascending, for each of ``k_partitions`` parts, none of them empty.

    With ``equal_size`` all parts have the same number of rows. The largest sum of lengths is kept small, as
    `phalanx.topology.balance` describes it.

    Raises:
        Refused: there are fewer rows than parts, or with ``equal_size`` they do not divide evenly.
    """
    rows = len(seqlen_list)
    require(
        0 < k_partitions <= rows,
        f"number of items:[{rows}] < k_partitions:[{k_partitions}]: each part needs a row, and there must be a part",
    )
    require(
        not equal_size or rows % k_partitions == 0,
        f"{rows} % {k_partitions} != 0: the rows do not divide into parts of equal size",
    )
    return balanced_partition(list(seqlen_list), k_partitions, equal_counts=equal_size)


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The same as :func:`get_seqlen_balanced_partitions`."""
    return get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The same as :func:`get_seqlen_balanced_partitions`."""
    return get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Least, largest and mean total length of equal consecutive runs of rows, and of the parts given."""
    size = len(seqlen_list) // len(partitions)
    before = [sum(seqlen_list[start : start + size]) for start in range(0, size * len(partitions), size)]
    after = [sum(seqlen_list[row] for row in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / len(partitions),
    }


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation."""
    found = [0] * len(idx_map)
    for place, row in enumerate(idx_map):
        found[row] = place
    return found


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[TensorDict], list[list[int]]]:
    """A batch cut into micro-batches of at most ``max_token_len`` tokens, as few as do.

    Args:
        batch: with ``attention_mask`` of shape (rows, length), or jagged ``input_ids``.
        dp_group: with ``same_micro_num_in_dp``, all ranks of it get as many micro-batches as the one with the most.
        num_batches_divided_by: their number is a multiple of it.
        min_num_micro_batch: there are at least so many.
        use_dynamic_bsz_balance: whether the costliest come first.
        force_group_size: so many consecutive rows stay together.

    Returns:
        The micro-batches, and the row numbers of each.

    Raises:
        Refused: a row may be longer than ``max_token_len``.
        ValueError: there are too few rows for so many micro-batches, on any rank of ``dp_group``.
    """
    lengths = _lengths(batch, max_token_len)
    size = force_group_size
    require(
        len(lengths) % size == 0,
        f"Batch size {len(lengths)} must be divisible by force_group_size {size}",
    )
    groups = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
    agreeing = dp_group if same_micro_num_in_dp else None
    parts = _parts(groups, max_token_len, min_num_micro_batch or 1, num_batches_divided_by or 1, agreeing)
    if use_dynamic_bsz_balance:
        costs = calculate_workload(torch.tensor(groups)).tolist()
        parts.sort(key=lambda part: sum(costs[group] for group in part), reverse=True)
    rows = [[group * size + i for group in part for i in range(size)] for part in parts]
    return [index_select_tensor_dict(batch, part) for part in rows], rows


def _lengths(batch: TensorDict, max_token_len: int) -> list[int]:
    if "attention_mask" in batch:
        mask = batch["attention_mask"]
        longest, lengths = mask.shape[-1], mask.flatten(1).sum(1)
    else:
        lengths = batch["input_ids"].offsets().diff()
        longest = lengths.max()
    require(
        max_token_len >= longest,
        "max_token_len must be greater than the sequence length. Got "
        f"max_token_len={max_token_len!r} and max_seq_len={longest!r}; it must be at least that",
    )
    return [int(length) for length in lengths]


def _parts(groups: Sequence[int], most: int, least: int, multiple: int, dp_group: Any) -> list[list[int]]:
    """As few parts as hold at most ``most`` tokens each, at least ``least`` and a multiple of ``multiple``.

    Ranks of ``dp_group`` agree on each step, since one that raised alone would leave the others in a collective.
    """
    largest, fewest = _largest([max(groups, default=0), -len(groups)], dp_group)
    if largest > most:
        raise ValueError(
            f"A forced group exceeds max_token_len and cannot be split. Got max_group_token_len={largest} and "
            f"max_token_len={most}. Raise max_token_len, or lower force_group_size"
        )
    (count,) = _largest([max(least, ceildiv(sum(groups), most), 1)], dp_group)
    count = roundup_divisible(count, multiple)
    while count <= -fewest:
        parts = balanced_partition(list(groups), count, equal_counts=False)
        too_long = max(sum(groups[group] for group in part) for part in parts) > most
        if not any(_largest([too_long], dp_group)):
            return parts
        count += multiple
    raise ValueError(
        "Cannot satisfy max_token_len while keeping forced groups atomic and using the same micro-batch count across "
        f"DP ranks. Requested {count} non-empty micro-batches, but a rank has only {-fewest} forced groups. Raise "
        "max_token_len, or lower min_num_micro_batch, num_batches_divided_by or force_group_size"
    )


def _largest(values: Sequence[int], dp_group: Any) -> list[int]:
    """The largest of each value over the ranks of ``dp_group``; without one, the values."""
    if dp_group is None:
        return list(values)
    held = torch.tensor(values, dtype=torch.int64, device=get_device_name())
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX, group=dp_group)
    return [int(value) for value in held]


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """As :func:`rearrange_micro_batches`, of a ``DataProto``, with its other columns and ``meta_info``."""
    _, rows = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    return [data.select_idxs(part) for part in rows], rows


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """The joined outputs of micro-batches in the order of the batch that they were cut from."""
    order = get_reverse_idx([row for part in batch_idx_list for row in part])
    require(
        len(order) == len(data),
        f"{len(order)} vs. {len(data)}: rows in the micro-batches, and rows of outputs, must be as many",
    )
    if data.is_nested:
        rows = data.unbind()
        return torch.nested.as_nested_tensor([rows[i] for i in order], layout=torch.jagged)
    return data[torch.tensor(order)]
