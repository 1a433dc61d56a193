"""Functions of the dispatch modes: from the caller's arguments to one list per argument, and back.

A dispatch function returns every argument as a list with one element per rank; a collect function gets the
outputs (or Ray's references to them) by rank.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from phalanx.compat.verl.overlay import VerlNotInstalled
from phalanx.dispatch.split import Shard
from phalanx.errors import DispatchError

#: Keyword argument in which a dispatch function returns the number of rows that it added.
_padding_size_key = "_padding_size_key_x123d"

Arguments = tuple[Any, dict[str, Any]]


class CallCheckFailed(DispatchError, AssertionError):
    """Arguments or outputs that do not fit the dispatch mode, for which verl has an assertion."""


class DirectCallOnly(DispatchError, NotImplementedError):
    """A call through the group of a method that serves rollout clients."""


def protocol() -> Any:
    """Return ``verl.protocol``.

    Raises:
        VerlNotInstalled: if verl is not installed.
    """
    try:
        return importlib.import_module("verl.protocol")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("verl"):
            raise
        raise VerlNotInstalled(
            "this dispatch mode splits or joins a DataProto, which needs verl: pip install verl, or use a mode that "
            "takes lists, such as Dispatch.DP_COMPUTE",
        ) from error


def is_future(value: Any) -> bool:
    """Return whether ``value`` is verl's ``DataProtoFuture``. Does not import verl."""
    module = sys.modules.get("verl.protocol")
    return module is not None and isinstance(value, module.DataProtoFuture)


def each(function: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Apply a function to every argument of a call."""
    return tuple(function(arg) for arg in args), {key: function(value) for key, value in kwargs.items()}


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Repeat each argument for every rank."""
    return each(lambda value: [value] * worker_group.world_size, args, kwargs)


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Return the arguments unchanged. ``execute_all`` deals them if all are lists of world_size elements."""
    return args, kwargs


def collect_all_to_all(worker_group: Any, output: Any) -> Any:
    """Return the outputs unchanged."""
    return output


def _check_list(argument: str, value: Any, size: int, meaning: str) -> None:
    if not isinstance(value, list | tuple) or len(value) != size:
        got = f"{len(value)} elements" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
        raise CallCheckFailed(
            f"{argument} is {got}; expected a list of {meaning} = {size} elements, one for each"
        )


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Deal lists or tuples of one element per rank."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        _check_list(f"Dispatch.DP_COMPUTE: argument {name!r}", value, worker_group.world_size, "world_size")
    return args, kwargs


def collect_dp_compute(worker_group: Any, output: Any) -> Any:
    """Return one output per rank."""
    if len(output) != worker_group.world_size:
        raise CallCheckFailed(
            f"{len(output)} outputs of a group of {worker_group.world_size}: expected one of each rank"
        )
    return output


def _split_args_kwargs_data_proto(chunks: int, *args: Any, **kwargs: Any) -> Arguments:
    """Split each argument into ``chunks`` shards, equal ones unless it has auto padding. A future is split later."""
    batches = protocol()

    def cut(value: Any, where: str) -> list[Any]:
        if is_future(value):
            return _split_future(value, chunks)
        data = batches.BatchData(value)
        if not data.is_chunkable():
            raise CallCheckFailed(
                f"{where} of type {type(value)} is not chunkable: rows are split over {chunks} ranks; expected a "
                "DataProto, a DataProtoFuture or a TensorDict. For values that all ranks get in full use "
                "Dispatch.ONE_TO_ALL, or put it into the DataProto's meta_info"
            )
        return list(data.chunk(chunks=chunks))  # a tuple would not be dealt

    cut_kwargs = {key: cut(value, f"kwarg '{key}'") for key, value in kwargs.items()}
    return [cut(arg, "arg") for arg in args], cut_kwargs


def _split_future(future: Any, chunks: int) -> list[Any]:
    """Return futures of ``chunks`` consecutive shards, whose sizes differ by one row at most."""
    return [
        protocol().DataProtoFuture(
            collect_fn=future.collect_fn,
            futures=future.futures,
            dispatch_fn=partial(_share, future.dispatch_fn, index, chunks),
        )
        for index in range(chunks)
    ]


def _share(earlier: Callable[[Any], Any] | None, index: int, chunks: int, batch: Any) -> Any:
    """Return shard ``index`` of a joined batch, after the future's own ``dispatch_fn``."""
    if earlier is not None:
        batch = earlier(batch)
    if len(batch) and not len(batch) % chunks:
        return batch.chunk(chunks)[index]  # a slice would refuse jagged tensors
    return batch[slice(*Shard(index, chunks).bounds(len(batch)))]


def _split_args_kwargs_data_proto_with_auto_padding(chunks: int, *args: Any, **kwargs: Any) -> Arguments:
    """Split each argument. Of a ``DataProto`` with auto padding, a padded copy is split.

    The returned keyword arguments have the number of added rows under ``_padding_size_key``.
    """
    padded: dict[int, int] = {}
    data_proto = protocol().DataProto

    def pad(value: Any) -> Any:
        if not isinstance(value, data_proto) or not value.is_padding_enabled():
            return value
        added = -len(value) % chunks
        padded[len(value)] = added
        if not added:
            return value
        value = copy.copy(value)  # padding() replaces the parts; the caller's batch keeps its own
        value.padding(padding_size=added)
        return value

    args, kwargs = each(pad, args, kwargs)
    if len(padded) > 1:
        first, other, *_ = padded
        raise CallCheckFailed(
            f"expecting all arg share same length of {first}, but got {other}: arguments of one call with auto padding "
            f"must have as many rows each, but have {sorted(padded)}"
        )
    args, kwargs = _split_args_kwargs_data_proto(chunks, *args, **kwargs)
    if padded:
        kwargs[_padding_size_key] = next(iter(padded.values()))
    return args, kwargs


def dispatch_dp_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Split rows over the ranks."""
    return _split_args_kwargs_data_proto_with_auto_padding(worker_group.world_size, *args, **kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Send the first argument, a function, to every rank, and split the rows of the others."""
    if not args or not isinstance(args[0], FunctionType):
        given = type(args[0]).__name__ if args else "nothing"
        raise CallCheckFailed(
            f"the first argument is {given}; expected a function (def or lambda), which goes to every rank"
        )
    rows, kwargs = _split_args_kwargs_data_proto(worker_group.world_size, *args[1:], **kwargs)
    return [[args[0]] * worker_group.world_size, *rows], kwargs


def _joined(output: list[Any]) -> Any:
    """Join the rows of all outputs. For references, return a future of the joined rows."""
    batch = protocol().BatchData(output)
    if not batch.is_concatable():
        types = sorted({type(one).__name__ for one in output})
        raise CallCheckFailed(
            f"expecting concatable output, but got element type {type(output[0]) if output else 'empty'}: the method "
            f"returned [{', '.join(types)}] where rows are joined. Expected a DataProto or a TensorDict of every rank; "
            "for other outputs register it with Dispatch.DP_COMPUTE_METRIC (a list by rank)"
        )
    return batch.concat()


def collect_dp_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """Join the rows of all ranks."""
    return _joined(collect_dp_compute(worker_group, output))


def dispatch_nd_compute(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Arguments:
    """Deal lists of dp_size elements: rank ``r`` gets element ``dp_rank_mapping[r]``."""

    def deal(value: Any) -> list[Any]:
        _check_list("an argument", value, dp_size, "dp_size")
        return [value[dp_rank] for dp_rank in dp_rank_mapping]

    return each(deal, args, kwargs)


def collect_nd_compute(collect_mask: list[bool], worker_group: Any, output: Any) -> list[Any]:
    """Return the outputs of the ranks whose mask is set, in rank order."""
    outputs = collect_dp_compute(worker_group, output)
    return [one for one, is_collected in zip(outputs, collect_mask, strict=True) if is_collected]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Arguments:
    """Split rows over dp. The ranks of a dp rank get the same shard."""
    args, kwargs = _split_args_kwargs_data_proto(dp_size, *args, **kwargs)
    return dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *args, **kwargs)


def collect_nd_compute_dataproto(collect_mask: list[bool], worker_group: Any, output: Any) -> Any:
    """Join the rows of the ranks whose mask is set."""
    return _joined(collect_nd_compute(collect_mask, worker_group, output))


def _asked_once(known: dict[str, Any], mesh_name: str, query: str, worker_group: Any) -> list[Any]:
    if mesh_name not in known:
        known[mesh_name] = getattr(worker_group, query)(mesh_name)
    if len(known[mesh_name]) != worker_group.world_size:
        raise CallCheckFailed(
            f"mesh {mesh_name!r}: {len(known[mesh_name])} ranks answered of a group of {worker_group.world_size}"
        )
    return known[mesh_name]


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any
) -> Arguments:
    """Split rows over the dp ranks of a registered mesh. The first call queries the workers."""
    mapping = _asked_once(worker_group._dispatch_info, mesh_name, "_query_dispatch_info", worker_group)
    return dispatch_nd_compute_dataproto(mapping, max(mapping) + 1, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Join the rows of the ranks that the mesh collects from."""
    mask = _asked_once(worker_group._collect_info, mesh_name, "_query_collect_info", worker_group)
    return collect_nd_compute_dataproto(mask, worker_group, *args, **kwargs)


def dummy_direct_rollout_call(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise DirectCallOnly: the method is for clients with a rank's handle."""
    raise DirectCallOnly(
        "Direct rollout call is forbidden. A method registered with Dispatch.DIRECT_ROLLOUT_METHOD is called on a "
        "rank's handle, not through the group: ray.get(group.workers[0].<method>.remote(...))"
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
    args, kwargs = _split_args_kwargs_data_proto(worker_group.dp_size, *args, **kwargs)
    return dispatch_megatron_compute(worker_group, *args, **kwargs)


def collect_megatron_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """Join the rows of the dp ranks."""
    return _joined(collect_megatron_compute(worker_group, output))
