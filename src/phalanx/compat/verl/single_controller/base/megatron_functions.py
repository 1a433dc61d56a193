"""Dispatch over Megatron's ranks: the modes ``MEGATRON_*`` of verl's earlier line.

The group knows the place of every rank (``get_megatron_rank_info``) and the sizes of the parallel state
(``get_megatron_global_info``).
"""

from __future__ import annotations

from typing import Any

from phalanx.compat.verl.errors import CallCheckFailed
from phalanx.compat.verl.single_controller.base.dispatch_functions import (
    Arguments,
    _concat_data_proto_or_future,
    _concatable,
    _each,
    _padding_size_key,
    _split_args_kwargs_data_proto_with_auto_padding,
)


def _deal(worker_group: Any, count: int, place: list[int], meaning: str, args: Any, kwargs: Any) -> Arguments:
    padding = {key: kwargs.pop(key) for key in list(kwargs) if key == _padding_size_key}

    def deal(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) != count:
            given = (
                f"{len(value)} elements" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            )
            raise CallCheckFailed(
                f"an argument is {given}; expected a list of {meaning} = {count} elements, one for each of them"
            )
        return [value[index] for index in place]

    args, kwargs = _each(deal, args, kwargs)
    return args, {**kwargs, **padding}


def _infos(worker_group: Any) -> list[Any]:
    return [worker_group.get_megatron_rank_info(rank=rank) for rank in range(worker_group.world_size)]


def _dp(worker_group: Any) -> tuple[int, list[int]]:
    return worker_group.dp_size, [info.dp_rank for info in _infos(worker_group)]


def _pp_dp(worker_group: Any) -> tuple[int, list[int]]:
    pp = worker_group.pp_size
    return pp * worker_group.dp_size, [info.dp_rank * pp + info.pp_rank for info in _infos(worker_group)]


def dispatch_megatron_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Each argument a list of dp_size elements; all tp, pp and cp ranks of a dp rank get the same one."""
    count, place = _dp(worker_group)
    return _deal(worker_group, count, place, "dp_size", args, kwargs)


def collect_megatron_compute(worker_group: Any, output: Any) -> list[Any]:
    """One output per dp rank, in dp order: of tp rank 0, cp rank 0 and the last pp rank."""
    last = worker_group.pp_size - 1
    chosen = {
        info.dp_rank: output[rank]
        for rank, info in enumerate(_infos(worker_group))
        if info.tp_rank == 0 and info.pp_rank == last and info.cp_rank == 0
    }
    return [chosen[dp_rank] for dp_rank in sorted(chosen)]


def dispatch_megatron_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Rows split over dp."""
    args, kwargs = _split_args_kwargs_data_proto_with_auto_padding(worker_group.dp_size, *args, **kwargs)
    return dispatch_megatron_compute(worker_group, *args, **kwargs)


def collect_megatron_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """The rows of the dp ranks, as one."""
    return _concat_data_proto_or_future(_concatable(collect_megatron_compute(worker_group, output)))


def dispatch_megatron_pp_as_dp(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Each argument a list of dp_size * pp_size elements: pp counts as part of dp."""
    count, place = _pp_dp(worker_group)
    return _deal(worker_group, count, place, "dp_size * pp_size", args, kwargs)


def collect_megatron_pp_as_dp(worker_group: Any, output: Any) -> list[Any]:
    """One output per dp and pp rank, in the order in which the arguments were dealt."""
    _, place = _pp_dp(worker_group)
    chosen = {
        place[rank]: output[rank]
        for rank, info in enumerate(_infos(worker_group))
        if info.tp_rank == 0 and info.cp_rank == 0
    }
    return [chosen[index] for index in sorted(chosen)]


def dispatch_megatron_pp_as_dp_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Rows split over dp and pp."""
    count = worker_group.dp_size * worker_group.pp_size
    args, kwargs = _split_args_kwargs_data_proto_with_auto_padding(count, *args, **kwargs)
    return dispatch_megatron_pp_as_dp(worker_group, *args, **kwargs)


def collect_megatron_pp_as_dp_data_proto(worker_group: Any, output: Any) -> Any:
    """The rows of the dp and pp ranks, as one."""
    return _concat_data_proto_or_future(_concatable(collect_megatron_pp_as_dp(worker_group, output)))


def collect_megatron_pp_only(worker_group: Any, output: Any) -> list[Any]:
    """One output per pp rank: of tp rank 0, dp rank 0 and cp rank 0."""
    chosen = {
        info.pp_rank: output[rank]
        for rank, info in enumerate(_infos(worker_group))
        if info.tp_rank == 0 and info.dp_rank == 0 and info.cp_rank == 0
    }
    return [chosen[pp_rank] for pp_rank in sorted(chosen)]
