"""The variables of a rank: what torch reads, device masks, threads and precedence."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import DeclarationError, PlacementError
from phalanx.topology.accelerators import accelerator
from phalanx.topology.environment import rank_environment

GPU = accelerator("GPU")


def env_of(**given: Any) -> dict[str, str]:
    defaults: dict[str, Any] = {
        "rank": 5,
        "world_size": 6,
        "local_rank": 1,
        "local_world_size": 2,
        "master_addr": "10.0.0.7",
        "master_port": 4711,
    }
    return rank_environment(**{**defaults, **given})


def test_identity_is_what_torch_expects():
    assert env_of() == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4711",
    }


def test_a_rank_that_sees_its_own_device_has_local_rank_zero():
    env = env_of(accelerator=GPU, own_ids=["5"], node_ids=["4", "5"], visible="own")

    assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == ("5", "0")


def test_a_rank_that_sees_its_node_has_the_index_of_its_device():
    env = env_of(accelerator=GPU, own_ids=["6"], node_ids=["4", "5", "6", "7"], visible="node")

    assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == ("4,5,6,7", "2")


def test_devices_shared_by_ranks_are_shown_once():
    env = env_of(accelerator=GPU, own_ids=["1"], node_ids=["0", "0", "1", "1"], visible="node")

    assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == ("0,1", "1")


def test_a_slot_of_several_devices_sees_all_of_them():
    env = env_of(accelerator=GPU, own_ids=["4", "5"])

    assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == ("4,5", "0")


def test_a_rank_without_devices_has_its_place_in_the_block():
    assert env_of(visible="node")["LOCAL_RANK"] == "1"


def test_every_alias_of_a_mask_is_set_to_the_same():
    env = env_of(accelerator=accelerator("rocm"), own_ids=["3"])

    assert (env["HIP_VISIBLE_DEVICES"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "3")


def test_an_accelerator_without_ids_hides_every_device():
    assert env_of(accelerator=GPU)["CUDA_VISIBLE_DEVICES"] == ""


def test_without_an_accelerator_masks_are_left_alone():
    assert not [name for name in env_of() if name.endswith("VISIBLE_DEVICES")]


def test_a_device_that_is_not_on_its_node_is_refused():
    with pytest.raises(PlacementError, match=r"devices \['9'\] of a rank are not among its node's \['4'\]"):
        env_of(accelerator=GPU, own_ids=["9"], node_ids=["4"], visible="node")


@pytest.mark.parametrize(("cpus", "slots", "threads"), [(16, 4, "4"), (2, 8, "1"), (9, 2, "4"), (4, 1, "4")])
def test_threads_are_the_nodes_cores_shared_by_the_slots_there(cpus, slots, threads):
    assert env_of(cpus_of_node=cpus, slots_on_node=slots)["OMP_NUM_THREADS"] == threads


def test_threads_set_for_the_group_win():
    env = env_of(cpus_of_node=16, slots_on_node=4, group_env={"OMP_NUM_THREADS": "3"})

    assert env["OMP_NUM_THREADS"] == "3"


def test_threads_that_the_process_was_started_with_win_over_a_share_and_not_over_the_groups():
    given = {"cpus_of_node": 16, "slots_on_node": 4, "threads": "1"}

    assert env_of(**given)["OMP_NUM_THREADS"] == "1"
    assert env_of(**given, group_env={"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_a_mask_that_the_user_gives_a_group_without_devices_stays():
    assert env_of(group_env={"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "0"


def test_identity_is_always_the_ranks_own():
    assert env_of(group_env={"RANK": "0", "MASTER_PORT": "1"})["RANK"] == "5"


def test_a_value_that_is_not_text_is_answered_with_the_text_to_write():
    with pytest.raises(DeclarationError, match="write DEBUG='1'"):
        env_of(group_env={"DEBUG": 1})


def test_the_callers_mappings_are_not_changed():
    group_env = {"A": "1"}

    env_of(group_env=group_env)

    assert group_env == {"A": "1"}


def test_an_unknown_visibility_is_refused_with_the_choices():
    with pytest.raises(DeclarationError, match="expected 'own'"):
        env_of(visible="all")
