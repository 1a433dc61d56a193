# Chapter 4 of verl's published tutorial of its Ray API, cell by cell, on the drop-in and megatron-core.
# A comment "adapted: ..." follows each line that differs from what was published, and says in what.
import phalanx.compat.verl

phalanx.compat.verl.install()  # adapted: backend

import os

import ray
import torch

ray.init(num_cpus=4, num_gpus=4)  # adapted: ray.init counts

import megatron  # adapted: paths (installed, so sys.path and PYTHONPATH stay as they are)
from megatron.core import parallel_state as mpu
from omegaconf import OmegaConf

from verl.single_controller.base.decorator import Dispatch, Execute, register  # noqa: F401
from verl.single_controller.base.megatron.worker import MegatronWorker
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: F401
from verl.single_controller.ray.megatron import NVMegatronRayWorkerGroup

print(megatron.__path__)  # adapted: paths (a namespace package has no __file__)

resource_pool = RayResourcePool([4], use_gpu=True, max_colocate_count=1)


@ray.remote
class MLPLayerWorker(MegatronWorker):
    def __init__(self):
        super().__init__()
        rank = int(os.environ["LOCAL_RANK"])  # noqa: F841
        torch.distributed.init_process_group(backend="gloo")  # adapted: device
        # adapted: device (torch.cuda.set_device(rank) is left out)

        mpu.initialize_model_parallel(
            tensor_model_parallel_size=4,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            # adapted: arguments (pipeline_model_parallel_split_rank=None is left out: megatron-core 0.16.1)
            use_sharp=False,
            context_parallel_size=1,
            expert_model_parallel_size=1,
            nccl_communicator_config_path=None,
        )
        torch.manual_seed(10)  # adapted: device (tensor_parallel.model_parallel_cuda_manual_seed)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, config):
        from omegaconf import OmegaConf

        from verl.models.llama.megatron.layers import ParallelLlamaMLP
        from verl.utils.megatron_utils import init_model_parallel_config

        megatron_config = OmegaConf.create(
            {
                "sequence_parallel": False,
                "param_dtype": "fp32",
                "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
                "pipeline_model_parallel_rank": mpu.get_pipeline_model_parallel_rank(),
                "pipeline_model_parallel_size": mpu.get_pipeline_model_parallel_world_size(),
                "virtual_pipeline_model_parallel_rank": mpu.get_virtual_pipeline_model_parallel_rank(),
                "virtual_pipeline_model_parallel_size": mpu.get_virtual_pipeline_model_parallel_world_size(),
            }
        )

        megatron_config = init_model_parallel_config(megatron_config)
        self.parallel_layer = ParallelLlamaMLP(config=config, megatron_config=megatron_config)

    @register(Dispatch.ONE_TO_ALL)
    def get_weights(self):
        output = {}
        for key, val in self.parallel_layer.named_parameters():
            output[key] = val
        return output

    @register(Dispatch.MEGATRON_COMPUTE)
    def run_layer(self, x):
        x = x.to("cpu")  # adapted: device
        y = self.parallel_layer(x)
        return y


layer_cls = RayClassWithInitArgs(cls=MLPLayerWorker)
layer_worker_group = NVMegatronRayWorkerGroup(
    resource_pool=resource_pool,
    ray_cls_with_init=layer_cls,
)

print(
    layer_worker_group.world_size,
    layer_worker_group.tp_size,
    layer_worker_group.pp_size,
    layer_worker_group.dp_size,
)

ffn_hidden_size = 11008
batch_size = 16
seq_len = int(os.environ.get("TUTORIAL_LENGTH", 2048))  # adapted: arguments (CI takes fewer)
hidden_size = 4096

config = OmegaConf.create(
    {
        "hidden_size": hidden_size,
        "intermediate_size": ffn_hidden_size,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "tp": layer_worker_group.tp_size,
    }
)

x = torch.rand(size=(seq_len, batch_size, hidden_size), dtype=torch.float32)

print(layer_worker_group.init_model(config))

output = layer_worker_group.run_layer([x])
print(output[0].shape)

ray.shutdown()
