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


def test_two_groups_of_one_name_share_no_files_and_a_restarted_one_begins_new_ones(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as pool:
        groups = [px.WorkerGroup(pool, px.Worker, name=f"twin-{backend}") for _ in range(2)]
        files = [group.core.endpoints[0].facts.files for group in groups]
        groups[0].restart()
        after = groups[0].core.endpoints[0].facts.files

    assert len({*files, after}) == 3
    assert (files[0].endswith("-0/rank-0"), after.endswith("-1/rank-0")) == (True, True)


@pytest.mark.parametrize("backend", ["ray"], indirect=True)
def test_on_ray_they_are_in_the_folder_of_the_sessions_logs(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as pool:
        files = px.WorkerGroup(pool, px.Worker, name="here").core.endpoints[0].facts.files

    assert "/logs/phalanx/" in files
    assert os.path.isdir(os.path.dirname(files))
