"""Folders in which the ranks of a group keep their files."""

from __future__ import annotations

import os

import pytest

import phalanx as px
from phalanx.members.launch import folder_name


@pytest.mark.parametrize(
    ("group", "folder"), [("../my group/actor é", "_my_group_actor__-3"), ("..", "group-3")]
)
def test_folder_names_of_groups_are_safe_in_a_path(group: str, folder: str) -> None:
    assert folder_name(group, 3) == folder


def test_groups_with_equal_names_share_no_files_and_a_restarted_group_begins_new_files(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as pool:
        groups = [px.WorkerGroup(pool, px.Worker, name=f"twin-{backend}") for _ in range(2)]
        files = [group.core.endpoints[0].facts.files for group in groups]
        groups[0].restart()
        after = groups[0].core.endpoints[0].facts.files

    assert len({*files, after}) == 3
    assert (files[0].endswith("-0/rank-0"), after.endswith("-1/rank-0")) == (True, True)
    if backend == "ray":  # in the folder of the session's logs
        assert "/logs/phalanx/" in after
        assert os.path.isdir(os.path.dirname(after))
