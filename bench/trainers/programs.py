"""Command lines of verl's own programs, in the smallest sizes that still train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

SITE = Path(__file__).with_name("site")
FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


@dataclass(frozen=True)
class Program:
    """The arguments after `python -m`, and the number of logical accelerators of the cluster."""

    name: str
    module: str
    overrides: tuple[str, ...]
    accelerators: int = 2

    def having(self, *overrides: str) -> Program:
        """Return the program with further overrides, which win."""
        return replace(self, overrides=(*self.overrides, *overrides))

    def without(self, beginning: str) -> Program:
        """Return the program without the overrides of that beginning."""
        return replace(self, overrides=tuple(one for one in self.overrides if not one.startswith(beginning)))

    def command(self) -> list[str]:
        return ["-m", self.module, *self.overrides]


def environment(data: Path, accelerators: int) -> Mapping[str, str]:
    """Return the variables that make verl run on CPUs; none of them names a controller."""
    return {
        "PYTHONPATH": str(SITE),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,hf_rollout",
        "VERL_ENGINE_DEVICE": "cuda",  # engines are registered for cuda and npu only; FSDP's runs on both and on CPUs
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_OVERRIDE_RESOURCES": f'{{"CPU": 32, "GPU": {accelerators}, "object_store_memory": 400000000}}',
        "RAY_ADDRESS": "local",  # not a cluster that happens to run on this machine
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
    }


def sft(data: Path, steps: int = 4, save_every: int = -1) -> Program:
    """Return supervised training over two ranks of FSDP2, which resumes if its folder has a checkpoint."""
    return Program(
        "sft",
        "verl.trainer.sft_trainer_ray",
        (
            f"model.path={data}/policy",
            "model.use_remove_padding=True",
            "model.enable_gradient_checkpointing=False",
            "+model.override_config.attn_implementation=sdpa",
            f"data.train_files={data}/sft.parquet",
            "data.train_batch_size=8",
            "data.micro_batch_size_per_gpu=2",
            "data.use_dynamic_bsz=False",
            "data.max_length=64",
            "engine.strategy=fsdp2",
            "engine.use_torch_compile=False",
            "engine.dtype=bfloat16",
            "optim.lr=1e-3",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=2",
            "trainer.logger=[console,file]",
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={save_every}",
            "trainer.default_local_dir=checkpoints",
        ),
    )


def main_ppo(data: Path, steps: int = 3) -> Program:
    """Return GRPO with a reference policy and generation, in verl's trainer of version 1, with a validation at the
    end.
    """
    role = "actor_rollout_ref"
    overrides = [
        *(f"data.{name}_files={data}/rl.parquet" for name in ("train", "val")),
        "data.train_batch_size=8",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        "data.val_max_samples=8",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        f"{role}.model.path={data}/policy",
        f"{role}.model.use_remove_padding=True",
        f"{role}.model.enable_gradient_checkpointing=False",
        f"+{role}.model.override_config.attn_implementation=sdpa",
        f"{role}.actor.strategy=fsdp2",
        f"{role}.actor.ppo_mini_batch_size=4",
        f"{role}.actor.ppo_micro_batch_size_per_gpu=2",
        f"{role}.actor.use_kl_loss=True",
        f"{role}.actor.optim.lr=1e-3",
        f"{role}.actor.use_torch_compile=False",
        *_fp32(f"{role}.actor.fsdp_config"),
        f"{role}.ref.strategy=fsdp2",
        f"{role}.ref.log_prob_micro_batch_size_per_gpu=2",
        *_fp32(f"{role}.ref.fsdp_config"),
        f"{role}.rollout.name=hf",
        f"{role}.rollout.n=2",
        f"{role}.rollout.tensor_model_parallel_size=2",
        f"{role}.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"{role}.rollout.agent.num_workers=1",
        f"{role}.rollout.dtype=float32",
        "algorithm.adv_estimator=grpo",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={SITE}/toy_reward.py",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        f"trainer.test_freq={steps}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.default_local_dir=checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.v1.sampler.custom_sampler.path={SITE}/ordered_sampler.py",
        "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
    ]
    return Program("main_ppo", "verl.trainer.main_ppo", tuple(overrides))


def with_critic(program: Program, data: Path) -> Program:
    """Return the program with GAE and a critic, whose head is saved."""
    return replace(program, name=f"{program.name}_critic").having(
        "algorithm.adv_estimator=gae",
        "critic.strategy=fsdp2",
        f"critic.model.path={data}/value",
        f"critic.model.tokenizer_path={data}/value",
        "critic.model.use_remove_padding=True",
        "critic.model.enable_gradient_checkpointing=False",
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "critic.optim.lr=1e-3",
        "critic.fsdp.use_torch_compile=False",
        f"+critic.fsdp.mixed_precision={FP32}",
    )


def main_ppo_v0(data: Path, steps: int = 3) -> Program:
    """Return the trainer of version 0 with a critic and an answer per prompt: the order of several is random in it."""
    made = with_critic(main_ppo(data, steps), data)
    return replace(made, name="main_ppo_v0").having("trainer.use_v1=False", "actor_rollout_ref.rollout.n=1")


def separate_async(data: Path, steps: int = 3) -> Program:
    """Return a program of two training ranks and a generating rank; a checkpoint engine transfers the weights."""
    role = "actor_rollout_ref"
    made = main_ppo(data, steps).having(
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.sampler.custom_sampler.path=null",
        "trainer.v1.sampler.custom_sampler.name=null",
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"{role}.hybrid_engine=True",
        f"{role}.rollout.nnodes=1",
        f"{role}.rollout.n_gpus_per_node=1",
        f"{role}.rollout.tensor_model_parallel_size=1",
        f"{role}.rollout.checkpoint_engine.backend=board",
        f"{role}.rollout.checkpoint_engine.custom_backend_module=board_engine",
        "data.gen_batch_size=1",
    )
    return replace(made, name="separate_async", accelerators=3)


def one_step_off_policy(data: Path, steps: int = 3) -> Program:
    """Return verl's experiment in which generation on separate ranks is a step ahead of training."""
    made = (
        separate_async(data, steps)
        .without("trainer.v1.")
        .without("data.gen_batch_size")  # of a batch; where rows stream it is 1
        .having(
            "hydra.searchpath=[pkg://verl.trainer.config]",  # its own is relative to a checkout of verl
            "trainer.use_v1=False",
            "actor_rollout_ref.hybrid_engine=False",
            "rollout.nnodes=1",
            "rollout.n_gpus_per_node=1",
        )
    )
    return replace(made, name="one_step_off_policy", module="verl.experimental.one_step_off_policy.main_ppo")


def fully_async_policy(data: Path, steps: int = 3) -> Program:
    """Return verl's experiment in which generation and training do not wait for each other."""
    made = (
        separate_async(data, steps)
        .without("trainer.v1.")
        .having(
            "actor_rollout_ref.hybrid_engine=False",
            "data.train_batch_size=0",
            "rollout.nnodes=1",
            "rollout.n_gpus_per_node=1",
            "rollout.n=2",
            "rollout.total_rollout_steps=24",
            "async_training.trigger_parameter_sync_step=2",
        )
    )
    return replace(
        made, name="fully_async_policy", module="verl.experimental.fully_async_policy.fully_async_main"
    )


def _fp32(where: str) -> list[str]:
    """Return single precision throughout, so that runs repeat bit for bit."""
    return [
        f"{where}.use_torch_compile=False",
        f"{where}.dtype=float32",
        f"+{where}.mixed_precision={FP32}",
    ]
