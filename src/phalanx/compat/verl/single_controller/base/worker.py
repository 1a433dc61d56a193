"""The base classes of workers: names of ``verl.single_controller.base.worker`` and ``base.megatron.worker``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register


@dataclass
class DistRankInfo:
    """Coordinates of a rank in Megatron's parallel state."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """Sizes of Megatron's parallel state."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class Worker:
    """Base class of workers. Rank and world size come from the process's environment."""

    def __init__(self) -> None:
        missing = [name for name in ("WORLD_SIZE", "RANK") if name not in os.environ]
        if missing:
            raise KeyError(
                f"{', '.join(missing)} not set: {type(self).__name__} is made by a RayWorkerGroup, which sets them; "
                "to create a worker without a group, in a test, set RANK and WORLD_SIZE"
            )
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._rank = int(os.environ["RANK"])
        self.fused_worker_dict: dict[str, Any] = {}
        self.__dispatch_dp_rank: dict[str, int] = {}
        self.__collect_dp_rank: dict[str, bool] = {}

    @property
    def rank(self) -> int:
        """This worker's rank in its group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._world_size

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """Return the role of that name in this process, or None."""
        return self.fused_worker_dict.get(worker_name)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this rank's dp rank in a mesh, and whether its outputs are collected.

        Raises:
            ValueError: if the mesh was registered before.
        """
        if mesh_name in self.__dispatch_dp_rank or mesh_name in self.__collect_dp_rank:
            raise ValueError(
                f"mesh_name {mesh_name} has been registered, with dp rank {self.__dispatch_dp_rank.get(mesh_name)}; "
                "choose another name"
            )
        self.__dispatch_dp_rank[mesh_name] = dp_rank
        self.__collect_dp_rank[mesh_name] = is_collect

    def __known(self, table: dict[str, Any], mesh_name: str) -> Any:
        if mesh_name not in table:
            raise AssertionError(
                f"{mesh_name} is not registered in {type(self).__name__} (known meshes: {sorted(table)}); call "
                "self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect) in the worker first"
            )
        return table[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """Return this rank's dp rank in a mesh."""
        return self.__known(self.__dispatch_dp_rank, mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Return whether this rank's outputs are collected in a mesh."""
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether this rank's outputs are collected in a mesh."""
        return self.__known(self.__collect_dp_rank, mesh_name)

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Return all registered meshes: ``{"dispatch_dp_rank": {name: dp rank}, "collect_dp_rank": {name: bool}}``."""
        return {"dispatch_dp_rank": self.__dispatch_dp_rank, "collect_dp_rank": self.__collect_dp_rank}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Register the mesh of another role of this process as ``mesh_name``.

        Args:
            mesh_name: name of the mesh.
            dispatch_dp_rank, collect_dp_rank: tables from ``get_dispatch_collect`` of the other role. Of several
                meshes, the mesh named ``mesh_name`` is taken, else the last.

        Raises:
            AssertionError: if the mesh was registered before.
        """
        for table, given in (
            (self.__dispatch_dp_rank, dispatch_dp_rank),
            (self.__collect_dp_rank, collect_dp_rank),
        ):
            if mesh_name in table:
                raise AssertionError(
                    f"{mesh_name} is already registered, {table.keys()}; choose another name for the mesh"
                )
            if given:
                table[mesh_name] = given.get(mesh_name, list(given.values())[-1])


class MegatronWorker(Worker):
    """A worker that initializes Megatron's parallel state in its constructor; its group then queries the state."""

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the sizes of the parallel state."""
        return DistGlobalInfo(**{f"{axis}_size": size for axis, size in _by_axis("world_size").items()})

    def get_megatron_rank_info(self) -> DistRankInfo:
        """Return this rank's coordinates in the parallel state."""
        return DistRankInfo(**{f"{axis}_rank": rank for axis, rank in _by_axis("rank").items()})


def _by_axis(what: str) -> dict[str, int]:
    from phalanx.parallel.megatron import by_axis, parallel_state  # loads torch

    return by_axis(parallel_state(), what)
