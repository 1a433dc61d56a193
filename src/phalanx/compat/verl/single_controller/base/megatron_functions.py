"""Dispatch over Megatron's ranks: ``MEGATRON_COMPUTE`` and ``MEGATRON_COMPUTE_PROTO`` of verl's earlier line.

The group knows every rank's coordinates (``get_megatron_rank_info``) and the sizes of the parallel state.
"""

from __future__ import annotations

from typing import Any

from phalanx.compat.verl.single_controller.base.dispatch_functions import (
    Arguments,
    _concat_data_proto_or_future,
    _concatable,
    _split_args_kwargs_data_proto_with_auto_padding,
    dispatch_nd_compute,
)


def _rank_infos(worker_group: Any) -> list[Any]:
    return [worker_group.get_megatron_rank_info(rank=rank) for rank in range(worker_group.world_size)]


def dispatch_megatron_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Deal lists of dp_size elements. All tp, pp and cp ranks of a dp rank get the same element."""
    dp_ranks = [info.dp_rank for info in _rank_infos(worker_group)]
    return dispatch_nd_compute(dp_ranks, worker_group.dp_size, worker_group, *args, **kwargs)


def collect_megatron_compute(worker_group: Any, output: Any) -> list[Any]:
    """Return one output per dp rank, in dp order: of tp rank 0, cp rank 0 and the last pp rank."""
    last = worker_group.pp_size - 1
    chosen = {
        info.dp_rank: output[rank]
        for rank, info in enumerate(_rank_infos(worker_group))
        if info.tp_rank == 0 and info.pp_rank == last and info.cp_rank == 0
    }
    return [chosen[dp_rank] for dp_rank in sorted(chosen)]


def dispatch_megatron_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Split rows over dp."""
    args, kwargs = _split_args_kwargs_data_proto_with_auto_padding(worker_group.dp_size, *args, **kwargs)
    return dispatch_megatron_compute(worker_group, *args, **kwargs)


def collect_megatron_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """Join the rows of the dp ranks."""
    return _concat_data_proto_or_future(_concatable(collect_megatron_compute(worker_group, output)))
