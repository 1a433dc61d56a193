"""Workers with coordinates in Megatron's parallel state."""

from __future__ import annotations

from phalanx.compat.verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo, Worker
from phalanx.parallel.megatron import parallel_state


class MegatronWorker(Worker):
    """A worker that initializes Megatron's parallel state in its constructor; its group then queries the state."""

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the sizes of the parallel state."""
        state = parallel_state()
        return DistGlobalInfo(
            tp_size=state.get_tensor_model_parallel_world_size(),
            dp_size=state.get_data_parallel_world_size(),
            pp_size=state.get_pipeline_model_parallel_world_size(),
            cp_size=state.get_context_parallel_world_size(),
        )

    def get_megatron_rank_info(self) -> DistRankInfo:
        """Return this rank's coordinates in the parallel state."""
        state = parallel_state()
        return DistRankInfo(
            tp_rank=state.get_tensor_model_parallel_rank(),
            dp_rank=state.get_data_parallel_rank(),
            pp_rank=state.get_pipeline_model_parallel_rank(),
            cp_rank=state.get_context_parallel_rank(),
        )
