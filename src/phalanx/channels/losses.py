"""What is lost with a process that is gone, in words."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.channels.channel_messages import Loss
from phalanx.channels.services import shown


def in_words(losses: Sequence[Loss]) -> str:
    """How much of whom, and why."""
    return "; ".join(f"{_counted(loss)} of {shown(loss.holder)}: {loss.why}" for loss in losses)


def _counted(loss: Loss) -> str:
    counts = [(loss.items, "item"), (loss.rows, "row"), (loss.puts, "waiting put")]
    return ", ".join(f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count)
