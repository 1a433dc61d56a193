"""The channels of a process, as the commands are shown them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import phalanx as px
from phalanx.channels.live_channels import ChannelCard, OpenChannel, OpenChannels


def test_a_channel_that_is_closed_while_it_is_looked_at_is_not_shown_any_more() -> None:
    shown: dict[str, Any] = {}
    with px.Channel(backend="inline") as channel:
        look = channel._look()
    there = OpenChannels()

    def looked_at() -> Any:
        there.closed("its key")
        return look

    transport: Any = SimpleNamespace(
        immediate=False, connected=lambda: True, job=lambda: "job", publish=shown.__setitem__
    )
    service: Any = SimpleNamespace(look=looked_at)
    card = ChannelCard("its key", "its name", "ray", None, "items", False)
    there._open[card.key] = OpenChannel(card, service, transport)

    there._tell()

    assert not any(shown.values())
