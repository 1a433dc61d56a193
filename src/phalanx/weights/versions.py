"""What came of a sync, and of which version a group's weights are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.calls.run_on import run_on
from phalanx.display.byte_format import size
from phalanx.errors import DeclarationError, PhalanxError, WeightsError
from phalanx.weights.planning.version_table import Weights
from phalanx.weights.sync_sides import Ranks, side_of
from phalanx.weights.worker import weight_handlers as questions
from phalanx.weights.worker.weight_requests import Asked

__all__ = ["Moved", "WeightsVersion", "status"]


class Moved(NamedTuple):
    """Bytes from a source rank to a target rank of ``group``, by which mover, in how many seconds of that target."""

    source: int
    group: str
    target: int
    mover: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class WeightsVersion:
    """A version of weights that arrived whole.

    Attributes:
        number: counted by the source; it never goes back.
        seconds: from the first call to the last answer.
        nbytes: of tensors that arrived, summed over the target ranks.
        wire_bytes: that the source ranks gave to their movers for it. Less than ``nbytes`` where several targets of a
            node read the same memory, or where only what changed travelled (``delta=True``).
        changed: of how many tensors the values are others than in the version before, as far as samples show.
        step: the source's count of optimizer steps, where it tells that.
        moved: bytes by pair of ranks.
    """

    number: int
    seconds: float
    nbytes: int
    changed: int
    step: int | None = None
    moved: tuple[Moved, ...] = field(default=(), repr=False)
    wire_bytes: int = 0

    def __str__(self) -> str:
        rate = f", {size(int(self.nbytes / self.seconds))}/s" if self.seconds > 0 else ""
        what = f"{size(self.nbytes)} in {self.seconds:.3g} s{rate}"
        return f"version {self.number}: {what}, {self.changed} tensors changed"


def status(group: Ranks, name: str, *, timeout: float | None = None) -> dict[int, Weights]:
    """Of which version the weights that a role accepts under ``name`` are, by rank.

    ``str()`` of each is "none" (the constructor's), "whole(3)" or "torn(3)". It is asked after the calls that were
    made before; ranks whose process is gone are left out.

    Args:
        group: a group, a role of it, or some of its ranks.
        name: of the weights.
        timeout: seconds to wait for ranks that are at a call; None waits as long as it takes.

    Raises:
        DeclarationError: the role accepts none of that name; the message has those that it accepts.
        WeightsError: a rank that is alive did not answer.
    """
    side = side_of(group, "target", name)
    dead = set(side.core.epoch.dead(side.core.transport))
    ranks = [rank for rank in side.ranks if rank not in dead]
    if not ranks:
        return {}
    title = f"px.weights.status({side.title!r}, {name!r})"
    asked = Asked("target", group.role, name)
    answers = run_on(side.core, questions.state, asked, ranks=ranks, title=title, checked=False).answers(
        timeout
    )
    refused = [answer for answer in answers.values() if isinstance(answer, DeclarationError)]
    if refused:
        raise DeclarationError(f"{title}: {refused[0]}")
    late = {rank: answer for rank, answer in answers.items() if isinstance(answer, Exception)}
    if late:
        rank, why = next(iter(late.items()))
        raise WeightsError(f"{title}: rank {rank} did not answer: {why}") from (
            why if isinstance(why, PhalanxError) else None
        )
    return answers
