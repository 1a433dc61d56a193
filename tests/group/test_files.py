"""Where the ranks of a group keep files of their own."""

from __future__ import annotations

import os

import pytest

import phalanx as px
from phalanx.members.launch import folder_name


@pytest.mark.parametrize(
    ("group", "folder"), [("../my group/actor é", "_my_group_actor__-3"), ("..", "group-3")]
)
def test_names_are_safe_in_a_path(group: str, folder: str) -> None:
    assert folder_name(group, 3) == folder


@pytest.mark.soak_on_cluster
def test_two_groups_of_one_name_share_no_files(backend: str) -> None:
    with px.ResourcePool([2], use_gpu=False) as pool:
        groups = [px.WorkerGroup(pool, px.Worker, name="twin") for _ in range(2)]
        files = [endpoint.facts.files for group in groups for endpoint in group.core.endpoints]

    assert len(set(files)) == 4


def test_a_restarted_group_begins_new_files(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as pool:
        group = px.WorkerGroup(pool, px.Worker)
        before = group.core.endpoints[0].facts.files
        group.restart()
        after = group.core.endpoints[0].facts.files

    assert (before.endswith("-0/rank-0"), after.endswith("-1/rank-0")) == (True, True)


@pytest.mark.parametrize("backend", ["ray"], indirect=True)
def test_on_ray_they_are_in_the_folder_of_the_sessions_logs(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as pool:
        files = px.WorkerGroup(pool, px.Worker, name="here").core.endpoints[0].facts.files

    assert "/logs/phalanx/" in files
    assert os.path.isdir(os.path.dirname(files))
