"""Sides that do not fit, and roles that cannot be synced, are refused before a byte moves."""

from __future__ import annotations

import functools

import pytest
import torch

import phalanx as px
from tests.weights.weight_workers import (
    NAME,
    Accepter,
    Actor,
    Publisher,
    Rollout,
    arrived,
    groups,
    joined,
    told,
)


@pytest.mark.parametrize(
    ("published", "accepted", "row"),
    [
        ({"w": torch.ones(3)}, {"w": torch.zeros(4)}, ("w", "float32 [4]", "float32 [3]", "target rank 0")),
        (
            {"a.w": torch.ones(3)},
            {"b.w": torch.zeros(3)},
            ("b.w", "float32 [3]", "no such name at the source (it has, for one, a.w)", "target rank 0"),
        ),
        (
            {"w": torch.ones(3, dtype=torch.int64)},
            {"w": torch.zeros(3)},
            ("w", "float32 [3]", "int64 [3]", "target rank 0"),
        ),
    ],
    ids=["shape", "name", "type"],
)
def test_what_does_not_fit_is_one_error_with_a_table(
    published: object, accepted: object, row: tuple[str, ...]
) -> None:
    with joined(published, accepted) as (sync, target):
        with pytest.raises(px.weights.WeightsMismatch) as raised:
            sync()

        assert [tuple(one) for one in raised.value.rows] == [row]
        assert all(part in str(raised.value) for part in ("name", "wanted", "found", "rank", row[0]))
        assert str(px.weights.status(target, NAME)[0]) == "none"
        assert all(not one.any() for one in arrived(target).values())


def boxes(*offsets: int) -> object:
    """Of a row each of a tensor of 4 rows, by rank."""
    return lambda rank: {"w": px.weights.ShardSpec((4, 2), (((offsets[rank], 0), (2, 2)),))}


def test_a_hole_between_the_parts_of_the_source_is_found() -> None:
    publishing = Publisher.bind(lambda _: {"w": torch.ones(2, 2)}, boxes=boxes(0, 0))
    with groups(publishing, Accepter.bind(lambda _: {"w": torch.zeros(4, 2)}), sizes=(2, 1)) as (
        source,
        target,
    ):
        sync = px.WeightSync(source, target, NAME)
        with pytest.raises(px.weights.WeightsMismatch) as raised:
            sync()

    assert [(row[0], "[2:4, 0:2]" in " ".join(row)) for row in raised.value.rows] == [("w", True)]


def test_parts_that_overlap_without_being_the_same_are_found() -> None:
    publishing = Publisher.bind(lambda _: {"w": torch.ones(2, 2)}, boxes=boxes(0, 1, 2))
    with groups(publishing, Accepter.bind(lambda _: {"w": torch.zeros(4, 2)}), sizes=(3, 1)) as (
        source,
        target,
    ):
        sync = px.WeightSync(source, target, NAME)
        with pytest.raises(px.weights.WeightsMismatch, match="overlap"):
            sync()


def test_every_rank_that_a_fault_is_about_is_named() -> None:
    def uneven(rank: int) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(3 + rank // 2)}

    with groups(Publisher.bind(told({"w": torch.ones(3)})), Accepter.bind(uneven), sizes=(1, 4)) as (
        source,
        target,
    ):
        sync = px.WeightSync(source, target, NAME)
        with pytest.raises(px.weights.WeightsMismatch) as raised:
            sync()

    assert {row[3] for row in raised.value.rows} == {"target rank 2", "target rank 3"}


def test_the_groups_go_on_after_a_mismatch() -> None:
    with groups(Publisher.bind(told({"w": torch.ones(3)})), Rollout) as (source, target):
        sync = px.WeightSync(source, target, NAME)
        with pytest.raises(px.weights.WeightsMismatch):
            sync()

        assert target.version() == [None]
        assert source.state == target.state == "ready"


@pytest.mark.parametrize(
    ("name", "source_name", "words"),
    [("other", None, "published weights 'other'"), (NAME, "other", "published weights 'other'")],
)
def test_a_name_that_nobody_publishes_is_told_with_those_that_there_are(
    name: str, source_name: str | None, words: str
) -> None:
    with groups(Actor, Rollout) as (source, target):
        sync = px.WeightSync(source, target, name, source_name=source_name)
        with pytest.raises(px.DeclarationError, match=words) as raised:
            sync()

        assert f"it has: ['{NAME}']" in str(raised.value)
        assert source.name in str(raised.value)


def test_a_target_that_accepts_nothing_is_told_what_to_call() -> None:
    with groups(Actor, Actor) as (source, target):
        sync = px.WeightSync(source, target, NAME)
        with pytest.raises(px.DeclarationError, match="accept_weights"):
            sync()


def test_what_is_no_group_is_refused_at_once() -> None:
    with groups(Actor) as (source,):
        with pytest.raises(px.DeclarationError, match="the target is 3; give a group"):
            px.WeightSync(source, 3, NAME)  # type: ignore[arg-type]
        with pytest.raises(px.DeclarationError, match="at least one group"):
            px.WeightSync(source, [], NAME)


@pytest.mark.parametrize(
    "options", [{"verify": "some"}, {"transport": "pigeon"}, {"bucket_bytes": 12}, {"timeout": -1.0}]
)
def test_options_that_are_none_are_refused_at_once(options: dict[str, object]) -> None:
    with groups(Actor, Rollout) as (source, target):
        make = functools.partial(px.WeightSync, source, target, NAME)
        with pytest.raises(px.PhalanxError, match=next(iter(options))):
            make(**options)  # type: ignore[arg-type]


def test_a_closed_sync_says_so() -> None:
    with groups(Actor, Rollout) as (source, target):
        with px.WeightSync(source, target, NAME) as sync:
            sync()

        with pytest.raises(px.DeclarationError, match="was closed"):
            sync()


def test_a_closed_group_says_so() -> None:
    with groups(Actor, Rollout) as (source, target):
        sync = px.WeightSync(source, target, NAME)
        sync()
        target.close()

        with pytest.raises(px.GroupClosed):
            sync()
        sync.close()
