"""Conversations that stay with the rank that has their caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px
from phalanx.testing import faults


class Server(px.Worker):
    @px.register
    def generate(self) -> int:
        return self.rank


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pool[0:3], Server, name="servers") as made:
        yield made


def test_a_key_stays_with_its_rank_and_keys_are_spread(group: px.WorkerGroup) -> None:
    first = {key: px.engines.sticky(group, key).generate() for key in "abc"}
    assert sorted(first.values()) == [0, 1, 2]
    assert {key: px.engines.sticky(group, key).generate() for key in "abc"} == first


def test_calls_of_a_key_can_be_submitted(group: px.WorkerGroup) -> None:
    assert (
        px.engines.sticky(group, "a").generate.submit().result(30) == px.engines.sticky(group, "a").generate()
    )


@pytest.mark.slow_on_cluster
def test_a_key_whose_rank_is_lost_goes_to_another(group: px.WorkerGroup) -> None:
    before = px.engines.sticky(group, "a").generate()
    faults.kill(group, before)
    with pytest.raises(px.WorkerDiedError):
        group.generate()
    group.restart()  # the other tests use it, too
    assert px.engines.sticky(group, "a").generate() in (0, 1, 2)


def test_a_method_that_is_not_there_is_said_so(group: px.WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="generat"):
        px.engines.sticky(group, "a").generat()


def test_a_negative_margin_is_refused(group: px.WorkerGroup) -> None:
    with pytest.raises(px.DeclarationError, match="margin"):
        px.engines.sticky(group, "a", margin=-1)
