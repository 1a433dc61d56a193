"""The channels, the staleness and the versions of weights of a run, as a file of a step."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.channels.channel import Channel
from phalanx.channels.live_channels import OpenChannel, open_channels
from phalanx.channels.restored import only_there
from phalanx.channels.saved_channels import SavedChannel, loaded
from phalanx.channels.services import services
from phalanx.channels.staleness import StalenessManager
from phalanx.channels.staleness_server import Lies, SavedStaleness, StalenessService
from phalanx.channels.staleness_state import StalenessStateMachine
from phalanx.checkpoint.steps import SavedStep, StepWriter
from phalanx.errors import CheckpointMismatch, DeclarationError
from phalanx.weights.sync_pairs import Ranks

__all__ = ["RunChannels"]

FILE = "driver/channels.pickle"
FILE_OF_FORMAT_1 = "driver/links.pickle"

_log = logging.getLogger("phalanx")
_Versions = dict[str, dict[tuple[str, str], int]]


class RunChannels:
    """The channels, the staleness and the groups of a run.

    Raises:
        DeclarationError: if two channels have the same name, or another process owns a channel or the staleness.
    """

    def __init__(
        self, groups: Mapping[str, Ranks], channels: Sequence[Channel], staleness: StalenessManager | None
    ) -> None:
        self._groups = groups
        self._channels = {channel.name: channel for channel in channels}
        self._staleness = staleness
        if len(self._channels) < len(channels):
            raise DeclarationError(
                "px.checkpoint.CheckpointManager(channels=): two of them have one name; give each channel once"
            )
        for channel in channels:
            _owned(channel)
        if staleness is not None:
            _service(staleness)

    def save(self, writer: StepWriter) -> None:
        """Add the current content to a step. Channels come first: the staleness drops what it accepted since.

        Raises:
            ChannelError: if the bytes of a channel's items cannot be read.
        """
        channels = {name: _snapshot_channel(channel) for name, channel in self._channels.items()}
        content: dict[str, Any] = {
            "channels": channels,
            "staleness": None
            if self._staleness is None
            else _snapshot_staleness(self._staleness, self._channels),
            "published": {
                name: dict(group.core.life.published_weights) for name, group in self._groups.items()
            },
            "had": {name: dict(group.core.life.had_weights) for name, group in self._groups.items()},
        }
        writer.write(FILE, pickle.dumps(content, 5))
        for name, channel in self._channels.items():
            writer.note(
                f"channels/{name}", {"kind": "channel", "text": f"{channel.items.waiting} items waiting"}
            )
        if self._staleness is not None:
            version, ready = self._staleness.version, self._staleness.paced.rows.ready
            text = f"version {version} in training, {ready} rows ready"
            writer.note("staleness", {"kind": "staleness", "text": text})
        versions = _texts(content["published"], content["had"])
        if versions:
            writer.note("weights", {"kind": "weights", "text": f"versions: {', '.join(versions)}"})

    def read(self, step: SavedStep) -> Mapping[str, Any]:
        """Return the content of a step, for :meth:`restore`, if it fits.

        Raises:
            CheckpointMismatch: if the run has other channels, or a staleness and the step has none, or vice versa.
            DeclarationError: if items passed through a channel already.
        """
        if FILE not in step.manifest.files:
            return self._read_format_1(step)
        saved = pickle.loads(step.read(FILE))
        if saved["channels"].keys() != self._channels.keys():
            raise CheckpointMismatch(
                f"the run was saved with channels {_names(saved['channels'])} and has {_names(self._channels)}; give "
                "it channels of the same names"
            )
        if (saved["staleness"] is None) != (self._staleness is None):
            had, has = ("no", "a") if saved["staleness"] is None else ("a", "no")
            raise CheckpointMismatch(f"the run was saved with {had} staleness and has {has} staleness=")
        for name, channel in self._channels.items():
            if _owned(channel).service.look().items.submitted:
                raise _too_late(f"channel {name!r}", "put into it")
        if self._staleness is not None and _service(self._staleness).state().submitted:
            raise _too_late("the staleness", "leased")
        return saved

    def _read_format_1(self, step: SavedStep) -> Mapping[str, Any]:
        saved = _Format1(io.BytesIO(step.read(FILE_OF_FORMAT_1))).load()
        if self._channels or self._staleness is not None:
            raise CheckpointMismatch(
                f"{step.folder} was saved by an earlier version, whose channels and staleness cannot be read; resume "
                "without channels= and staleness=, and begin with new ones"
            )
        if saved.channels or saved.staleness is not None:
            _log.warning("%s: the content of its channels and staleness is not restored", step.folder)
        versions: list[_Versions] = [
            {group: {(role, name): number for role, name, number in found} for group, found in one.items()}
            for one in (saved.published, saved.had)
        ]
        return {"channels": {}, "staleness": None, "published": versions[0], "had": versions[1]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the content. Versions of weights never go back."""
        for name, channel in self._channels.items():
            _restore_channel(channel, saved["channels"][name])
        if self._staleness is not None:
            _restore_staleness(self._staleness, self._channels, saved)
        for versions in (saved["published"], saved["had"]):
            for name, group in self._groups.items():
                numbers = group.core.life.published_weights
                for key, number in versions.get(name, {}).items():
                    numbers[key] = max(number, numbers.get(key, 0))


def _texts(published: _Versions, had: _Versions) -> list[str]:
    """Return the versions that each group has published itself, as text."""
    return [
        f"{group}.{name} {number}"
        for group, versions in published.items()
        for (role, name), number in sorted(versions.items())
        if number > had[group].get((role, name), 0)
    ]


class _Format1(pickle.Unpickler):
    """Reads the file of format 1, whose class is gone."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "phalanx.checkpoint.flow_state":
            return type(global_name, (), {})
        try:
            return super().find_class(module_name, global_name)
        except (ImportError, AttributeError):
            return type(global_name, (), {"__init__": lambda self, *args: None})


def _owned(channel: Channel) -> OpenChannel:
    found = open_channels.get(channel.card.key)
    if found is None:
        raise DeclarationError(
            f"px.checkpoint.CheckpointManager: channel {channel.name!r} was closed, or belongs to another process; the "
            "driver that saves a run has to create its channels"
        )
    return found


def _service(staleness: StalenessManager) -> StalenessService:
    found = services.get(staleness.card.key)
    if not isinstance(found, StalenessService):
        raise DeclarationError(
            "px.checkpoint.CheckpointManager: the staleness belongs to another process; the driver that saves a run "
            "has to create it"
        )
    return found


def _snapshot_channel(channel: Channel) -> bytes:
    # Without the function of the lengths: the channel that continues has its own.
    return pickle.dumps(replace(channel.save(), lengths=None), 5)


def _restore_channel(channel: Channel, data: bytes) -> None:
    owned, saved = _owned(channel), pickle.loads(data)
    state = replace(saved.state, maxsize=owned.card.maxsize, by=owned.card.by)
    if not owned.service.go_on_from(loaded(replace(saved, state=state), owned.transport)):
        raise _too_late(f"channel {channel.name!r}", "put into it")


def _snapshot_staleness(staleness: StalenessManager, channels: Mapping[str, Channel]) -> bytes:
    keys = {channel.card.key: name for name, channel in channels.items()}
    return pickle.dumps((keys, _service(staleness).saved()), 5)


def _restore_staleness(
    staleness: StalenessManager, channels: Mapping[str, Channel], saved: Mapping[str, Any]
) -> None:
    was: SavedStaleness
    keys, was = pickle.loads(saved["staleness"])
    card = staleness.card
    state = replace(was.state, max_lag=card.max_lag, rows_per_version=card.rows_per_version, depth=card.depth)
    lies: dict[tuple[str, int], Lies] = {}
    there: list[tuple[int, int, int]] = []
    for (key, number), where in was.lies.items():
        name = keys.get(key)
        if name is None:
            continue
        lies[channels[name].card.key, number] = where
        channel: SavedChannel = pickle.loads(saved["channels"][name])
        cuts = [cut for cut in channel.state.ledger.waiting if cut.number == number]
        there += [(where.lease, where.start + cut.start, where.start + cut.stop) for cut in cuts]
    if was.follows:
        state = only_there(state, there)
    machine = StalenessStateMachine.load(state, with_ready=was.follows or bool(channels))
    if not _service(staleness).go_on_from(machine, lies):
        raise _too_late("the staleness", "leased")


def _too_late(subject: str, verb: str) -> DeclarationError:
    return DeclarationError(
        f"run.resume: {subject} cannot be restored, for something was {verb} already; resume before anything moves"
    )


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
