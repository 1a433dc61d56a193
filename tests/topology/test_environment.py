"""The accelerator table, and the environment of a rank: variables of torch, device masks, threads, precedence."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import DeclarationError, PlacementError
from phalanx.topology.environment import accelerator, rank_environment, resource_names

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


def test_identity_variables_are_set_for_torch_and_override_the_group_environment():
    identity = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    identity |= {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4711"}

    assert env_of() == env_of(group_env={"RANK": "0", "MASTER_PORT": "1"}) == identity


@pytest.mark.parametrize(
    ("own_ids", "node_ids", "visible", "mask", "local_rank"),
    [
        (["5"], ["4", "5"], "own", "5", "0"),
        (["4", "5"], [], "own", "4,5", "0"),
        (["6"], ["4", "5", "6", "7"], "node", "4,5,6,7", "2"),
        (["1"], ["0", "0", "1", "1"], "node", "0,1", "1"),
        ([], [], "node", "", "1"),
    ],
    ids=["its own", "several of its own", "its node's", "shared devices once", "none: all hidden"],
)
def test_the_local_rank_is_an_index_into_the_visible_devices_of_a_rank(
    own_ids, node_ids, visible, mask, local_rank
):
    env = env_of(accelerator=GPU, own_ids=own_ids, node_ids=node_ids, visible=visible)

    assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == (mask, local_rank)


def test_a_group_without_devices_keeps_the_users_mask():
    assert env_of(group_env={"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_rank_has_at_least_one_thread():
    assert env_of(cpus_of_node=2, slots_on_node=8)["OMP_NUM_THREADS"] == "1"


def test_a_device_that_its_node_lacks_is_refused():
    with pytest.raises(PlacementError, match=r"devices \['9'\] of a rank are not among its node's \['4'\]"):
        env_of(accelerator=GPU, own_ids=["9"], node_ids=["4"], visible="node")


def test_resource_names_are_unique_and_listed_if_an_accelerator_is_unknown():
    assert resource_names() == ("GPU", "NPU", "TPU", "HPU", "neuron_cores")
    with pytest.raises(DeclarationError, match="neuron_cores"):
        accelerator("FPGA")
