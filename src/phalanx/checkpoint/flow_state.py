"""What stands between groups, as a saved run has it: channels with what they hold, staleness, numbers of weights."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.channels.channel import Channel
from phalanx.channels.live_channels import OpenChannel, open_channels
from phalanx.channels.restored import only_there
from phalanx.channels.saved_channels import SavedChannel, loaded
from phalanx.channels.services import services
from phalanx.channels.staleness import StalenessManager
from phalanx.channels.staleness_server import Lies, SavedStaleness, StalenessService
from phalanx.channels.staleness_state import StalenessStateMachine as StalenessMachine
from phalanx.display.byte_format import size
from phalanx.errors import CheckpointMismatch, DeclarationError
from phalanx.weights.sync_sides import Ranks

__all__ = ["Links", "SavedLinks"]

Numbers = dict[str, list[tuple[str, str, int]]]
"""(role, name, version) by name of the group."""


@dataclass(frozen=True)
class SavedLinks:
    """As it is pickled into a step.

    Attributes:
        channels: by name. They are looked at before the staleness: what comes between is dropped there when it is
            loaded, and not trained on twice.
        keys: names of the channels by the keys that ``staleness`` knows them by.
        published, had: newest versions of weights.
    """

    channels: dict[str, SavedChannel]
    keys: dict[str, str]
    staleness: SavedStaleness | None
    published: Numbers
    had: Numbers

    def described(self) -> dict[str, Any]:
        """What the manifest has of it, by part."""
        parts: dict[str, Any] = {}
        for name, one in self.channels.items():
            entries = one.state.ledger.entries
            nbytes = size(sum(entry.item.nbytes for entry in entries))
            parts[f"channels/{name}"] = {"kind": "channel", "text": f"{len(entries)} items, {nbytes}"}
        if self.staleness is not None:
            state = self.staleness.state
            ready = sum(one.rows for one in state.ready)
            text = f"version {state.version} in training, {ready} rows ready"
            parts["staleness"] = {"kind": "staleness", "text": text}
        versions = [
            f"{group}.{name} {number}"
            for group, all_of in self.published.items()
            for role, name, number in all_of
            # Else it is where the group would go on, which it never did.
            if number > self._had(group, role, name)
        ]
        if versions:
            parts["weights"] = {"kind": "weights", "text": f"versions: {', '.join(versions)}"}
        return parts

    def _had(self, group: str, role: str, name: str) -> int:
        numbers = {(of, what): number for of, what, number in self.had.get(group, [])}
        return numbers.get((role, name), 0)

    def to_bytes(self) -> bytes:
        """As a file."""
        return pickle.dumps(self, 5)


class Links:
    """The channels, the staleness and the groups of a run."""

    def __init__(
        self, groups: Mapping[str, Ranks], channels: Sequence[Channel], staleness: StalenessManager | None
    ) -> None:
        self._groups = groups
        self._channels = {one.name: one for one in channels}
        self._staleness = staleness
        if len(self._channels) < len(channels):
            raise DeclarationError(
                "px.checkpoint.CheckpointManager(channels=): two of them have one name; give each one once"
            )
        for one in channels:
            _own(one)
        if staleness is not None:
            _home(staleness)

    def save(self) -> SavedLinks:
        """How all of it is now.

        Raises:
            ChannelError: the bytes of a channel's items cannot be read.
        """
        # Without the function of their lengths: that of the channel which goes on is used.
        channels = {name: replace(one.save(), lengths=None) for name, one in self._channels.items()}
        keys = {one.card.key: name for name, one in self._channels.items()}
        staleness = None if self._staleness is None else _home(self._staleness).saved()
        published = {name: _listed(group.core.life.published_weights) for name, group in self._groups.items()}
        had = {name: _listed(group.core.life.had_weights) for name, group in self._groups.items()}
        return SavedLinks(channels, keys, staleness, published, had)

    def check(self, saved: SavedLinks) -> None:
        """See to it that the run has what was saved, and that nothing went through its channels yet.

        Raises:
            CheckpointMismatch: it has other channels, or staleness where there was none or the other way round.
            DeclarationError: something went through.
        """
        if saved.channels.keys() != self._channels.keys():
            raise CheckpointMismatch(
                f"the run was saved with channels {_names(saved.channels)} and has {_names(self._channels)}; give it "
                "channels of the same names"
            )
        if (saved.staleness is None) != (self._staleness is None):
            had, has = ("no", "a") if saved.staleness is None else ("a", "no")
            raise CheckpointMismatch(f"the run was saved with {had} staleness and has {has} staleness=")
        for name, one in self._channels.items():
            if _own(one).service.look().items.submitted:
                raise _too_late(f"channel {name!r}", "put into it")
        if self._staleness is not None and _home(self._staleness).state().submitted:
            raise _too_late("the staleness", "begun")

    def load(self, saved: SavedLinks) -> None:
        """Have all of it as it was saved; see :meth:`check`."""
        for name, one in self._channels.items():
            own, state = _own(one), saved.channels[name].state
            state = replace(state, maxsize=own.card.maxsize, by=own.card.by)
            machine = loaded(replace(saved.channels[name], state=state), own.transport)
            if not own.service.go_on_from(machine):
                raise _too_late(f"channel {name!r}", "put into it")
        if self._staleness is not None and saved.staleness is not None:
            self._load_staleness(self._staleness, saved, saved.staleness)
        for name, group in self._groups.items():
            _raise_to(group.core.life.published_weights, saved.published.get(name, []))
            _raise_to(group.core.life.published_weights, saved.had.get(name, []))

    def _load_staleness(self, staleness: StalenessManager, saved: SavedLinks, was: SavedStaleness) -> None:
        card = staleness.card
        state = replace(
            was.state, max_lag=card.max_lag, rows_per_version=card.rows_per_version, depth=card.depth
        )
        lies: dict[tuple[str, int], Lies] = {}
        there: list[tuple[int, int, int]] = []
        for (key, number), where in was.lies.items():
            name = saved.keys.get(key)
            if name is None:
                continue
            lies[self._channels[name].card.key, number] = where
            cuts = [cut for cut in saved.channels[name].state.ledger.waiting if cut.number == number]
            there += [(where.lease, where.start + cut.start, where.start + cut.stop) for cut in cuts]
        if was.follows:
            state = only_there(state, there)
        machine = StalenessMachine.load(state, with_ready=was.follows or bool(saved.channels))
        if not _home(staleness).go_on_from(machine, lies):
            raise _too_late("the staleness", "begun")


def _own(channel: Channel) -> OpenChannel:
    one = open_channels.get(channel.card.key)
    if one is None:
        raise DeclarationError(
            f"px.checkpoint.CheckpointManager: channel {channel.name!r} is closed, or belongs to another "
            f"process; the driver that saves a run "
            "has to be the one that made its channels"
        )
    return one


def _home(staleness: StalenessManager) -> StalenessService:
    service = services.get(staleness.card.key)
    if not isinstance(service, StalenessService):
        raise DeclarationError(
            "px.checkpoint.CheckpointManager: the staleness belongs to another process; the driver that "
            "saves a run has to be the one that made "
            "it"
        )
    return service


def _too_late(what: str, done: str) -> DeclarationError:
    return DeclarationError(
        f"run.resume: {what} cannot become what it was, for something was {done} already; resume before anything moves"
    )


def _listed(numbers: Mapping[tuple[str, str], int]) -> list[tuple[str, str, int]]:
    return [(role, name, number) for (role, name), number in sorted(numbers.items())]


def _raise_to(numbers: dict[tuple[str, str], int], saved: Sequence[tuple[str, str, int]]) -> None:
    for role, name, number in saved:
        numbers[role, name] = max(number, numbers.get((role, name), 0))


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
