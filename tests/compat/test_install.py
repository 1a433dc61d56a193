"""``install()`` without verl: the single controller under verl's names, here and in other processes."""

from __future__ import annotations

import pytest
import ray

from tests.compat.overlay.test_reach import run


@pytest.mark.slow
def test_verl_modules_that_the_tutorial_imports_come_from_phalanx() -> None:
    output = run(
        """
        import phalanx.compat.verl
        phalanx.compat.verl.install()
        phalanx.compat.verl.install()
        import importlib, sys
        homes = {name: name for name in ["single_controller", "single_controller.base",
                                         "single_controller.base.decorator", "single_controller.base.worker",
                                         "single_controller.base.worker_group", "single_controller.ray",
                                         "single_controller.ray.base"]}
        homes["single_controller.base.megatron.worker"] = "single_controller.base.worker"
        for name in ["single_controller.ray.megatron", "utils.megatron_utils", "models.llama.megatron",
                     "models.llama.megatron.layers"]:
            homes[name] = "megatron"
        for name, home in homes.items():
            module = importlib.import_module("verl." + name)
            assert module is sys.modules["phalanx.compat.verl." + home], name
            assert module.__spec__.name == module.__name__ == "phalanx.compat.verl." + home
        import verl
        from verl.single_controller.base.decorator import collect_all_to_all
        print(verl.__version__, collect_all_to_all.__module__)
        """
    )

    assert output.split() == ["0.9.1", "phalanx.compat.verl.single_controller.base.dispatch_functions"]


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import verl.trainer.ppo", "verl.trainer"),
        ("import verl.utils.device", "verl.utils.device"),
        ("import verl.overlay", "verl.overlay"),
        ("from verl import DataProto", None),
    ],
)
def test_other_modules_of_verl_need_an_installed_verl(statement: str, name: str | None) -> None:
    output = run(
        f"""
        import phalanx.compat.verl
        phalanx.compat.verl.install()
        try:
            {statement}
        except ModuleNotFoundError as error:
            print(error.name, error, sep="|")
        """
    )

    assert output.startswith(f"{name}|")
    assert "pip install verl" in output


def test_import_alone_installs_nothing_and_install_refuses_another_module_named_verl() -> None:
    output = run(
        """
        import sys, types
        import phalanx.compat.verl
        print("verl" in sys.modules, any("phalanx" in type(finder).__module__ for finder in sys.meta_path))
        sys.modules["verl"] = types.ModuleType("verl")
        try:
            phalanx.compat.verl.install()
        except ImportError as error:
            print(error)
        """
    )

    assert output.startswith("False False")
    assert "another module verl is imported" in output


@pytest.mark.parametrize("late", [True, False])
def test_a_first_install_after_ray_init_warns(late: bool) -> None:
    output = run(
        f"""
        import ray, warnings
        import phalanx.compat.verl
        if not {late}:
            phalanx.compat.verl.install()
        ray.is_initialized = lambda: True
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            phalanx.compat.verl.install()
        print([f"{{one.category.__name__}}: {{one.message}}" for one in told])
        """
    )

    assert ("RuntimeWarning: " in output) == ("before ray.init" in output) == late


TRAINER = """
import phalanx.compat.verl
phalanx.compat.verl.install()
import ray
ray.init({where}, include_dashboard=False, namespace="training")

@ray.remote(num_cpus=0)
class Trainer:
    def fit(self):
        from verl.single_controller.base import Worker
        from verl.single_controller.base.decorator import Dispatch, register
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        class Model(Worker):
            @register(Dispatch.DP_COMPUTE)
            def add(self, x):
                from verl.single_controller.base.megatron.worker import MegatronWorker
                assert issubclass(MegatronWorker, Worker)
                return x + self.rank + 1

        pool = RayResourcePool([2], use_gpu=False)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Model)), name_prefix="model")
        return group.add([10, 20])

@ray.remote(num_cpus=0)
def task():
    from verl.single_controller.base import Worker
    return Worker.__module__

print(ray.get(task.remote()), ray.get(Trainer.remote().fit.remote()))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", ["local", "running"])
def test_tasks_and_a_trainer_actor_use_the_drop_in(ray_cluster: None, cluster: str) -> None:
    address = "local" if cluster == "local" else ray.get_runtime_context().gcs_address

    output = run(TRAINER.format(where=f"address={address!r}"))

    assert "phalanx.compat.verl.single_controller.base.worker [11, 22]" in output
