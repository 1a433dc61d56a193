"""The channels, the staleness and the versions of weights of a run, as a file of a step."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.channels.channel import Channel
from phalanx.channels.channel_snapshots import check_owned, describe, restore, snapshot
from phalanx.channels.staleness import StalenessManager
from phalanx.checkpoint.steps import SavedStep, StepWriter
from phalanx.errors import ChannelError, CheckpointMismatch, DeclarationError
from phalanx.weights.sync_pairs import Ranks

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
        try:
            check_owned(channels, staleness)
        except ChannelError as error:
            raise DeclarationError(
                f"px.checkpoint.CheckpointManager: {error}; the driver that saves a run has to create its channels and "
                "its staleness"
            ) from None

    def save(self, writer: StepWriter) -> None:
        """Add the current content to a step. Channels and staleness are of the same moment.

        Raises:
            ChannelError: if the bytes of a channel's items cannot be read.
        """
        has_flow = bool(self._channels) or self._staleness is not None
        flow = snapshot([*self._channels.values()], self._staleness) if has_flow else b""
        content: dict[str, Any] = {
            "channels": tuple(self._channels),
            "staleness": self._staleness is not None,
            "flow": flow,
            "published": {name: dict(group.core.published_weights) for name, group in self._groups.items()},
            "had": {name: dict(group.core.had_weights) for name, group in self._groups.items()},
        }
        writer.write(FILE, pickle.dumps(content, 5))
        for name, text in (describe(flow) if flow else {}).items():
            writer.note(name, {"kind": "staleness" if name == "staleness" else "channel", "text": text})
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
        if set(saved["channels"]) != self._channels.keys():
            raise CheckpointMismatch(
                f"the run was saved with channels {_names(saved['channels'])} and has {_names(self._channels)}; give "
                "it channels of the same names"
            )
        if saved["staleness"] != (self._staleness is not None):
            had, has = ("a", "no") if saved["staleness"] else ("no", "a")
            raise CheckpointMismatch(f"the run was saved with {had} staleness and has {has} staleness=")
        for name, channel in self._channels.items():
            if channel.items.submitted:
                raise _too_late(f"channel {name!r}", "put into it")
        if self._staleness is not None and self._staleness.stats.rows.submitted:
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
        return {"channels": (), "staleness": False, "flow": b"", "published": versions[0], "had": versions[1]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the content. Versions of weights never go back."""
        if saved["flow"]:
            restore(saved["flow"], [*self._channels.values()], self._staleness)
        for versions in (saved["published"], saved["had"]):
            for name, group in self._groups.items():
                numbers = group.core.published_weights
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


def _too_late(subject: str, verb: str) -> DeclarationError:
    return DeclarationError(
        f"run.resume: {subject} cannot be restored, for something was {verb} already; resume before anything moves"
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
