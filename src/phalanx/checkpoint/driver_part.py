"""The driver's part of a run: its own state, channels, staleness and the versions of weights."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import cloudpickle
import torch

from phalanx.channels.channel import Channel
from phalanx.channels.channel_snapshots import check_owned, describe, restore, snapshot
from phalanx.channels.staleness import StalenessManager
from phalanx.checkpoint.steps import Step, StepWriter
from phalanx.declare.stateful import stateful, ways_of
from phalanx.errors import ChannelError, CheckpointError, CheckpointMismatch, DeclarationError
from phalanx.weights.sync_pairs import Ranks
from phalanx.worker.rank_state import Generators

DRIVER = "driver"
"""Name of the part."""
_STATE = "driver/state.pickle"
_CHANNELS = "driver/channels.pickle"
_CHANNELS_OF_FORMAT_1 = "driver/links.pickle"
_VERB = "px.checkpoint.CheckpointManager"

_log = logging.getLogger("phalanx")
_Versions = Mapping[str, Mapping[tuple[str, str], int]]


class DriverPart:
    """The driver's part of a run; the arguments are those of ``CheckpointManager``.

    Raises:
        DeclarationError: if ``state`` has no state, two channels have the same name, or another process owns a channel
            or the staleness.
    """

    def __init__(
        self,
        state: Any,
        groups: Mapping[str, Ranks],
        channels: Sequence[Channel],
        staleness: StalenessManager | None,
    ) -> None:
        self._groups = groups
        self._state: MutableMapping[str, Any] = {} if state is None else {"state": state}
        if isinstance(state, MutableMapping) and ways_of(state) is None:
            self._state = state
        elif state is not None and ways_of(state) is None:
            raise DeclarationError(
                f"{_VERB}(state={type(state).__name__}): give something with state_dict() and load_state_dict(), a "
                "random generator, or a dict of such things and of plain values"
            )
        self._owner: Any = stateful(self._state)
        self._channels = {channel.name: channel for channel in channels}
        self._staleness = staleness
        if len(self._channels) < len(channels):
            raise DeclarationError(f"{_VERB}(channels=): two of them have one name; give each channel once")
        try:
            check_owned(channels, staleness)
        except ChannelError as error:
            raise DeclarationError(
                f"{_VERB}: {error}; the driver that saves a run has to create its channels and its staleness"
            ) from None

    def save(self, writer: StepWriter) -> None:
        """Add the current content to a step. Channels and staleness are of the same moment.

        Raises:
            CheckpointError: if a value of the state cannot be pickled.
            ChannelError: if the bytes of a channel's items cannot be read.
        """
        values: dict[str, bytes] = {}
        for name, value in self._owner.state_dict().items():
            try:
                values[name] = cloudpickle.dumps(value, 5)
            except Exception as error:
                raise CheckpointError(f"{name!r} of the driver's state cannot be pickled: {error}") from error
        names = [str(name) for name in self._state]
        writer.write(_STATE, pickle.dumps((names, values, _generators().state_dict()), 5))
        writer.parts[DRIVER] = {"kind": "driver", "text": ", ".join([*names, "random numbers"])}
        has_flow = bool(self._channels) or self._staleness is not None
        flow = snapshot([*self._channels.values()], self._staleness) if has_flow else b""
        published = {name: dict(group.core.published_weights) for name, group in self._groups.items()}
        had = {name: dict(group.core.had_weights) for name, group in self._groups.items()}
        content: dict[str, Any] = {
            "channels": tuple(self._channels),
            "staleness": self._staleness is not None,
            "flow": flow,
            "published": published,
            "had": had,
        }
        writer.write(_CHANNELS, pickle.dumps(content, 5))
        for name, text in (describe(flow) if flow else {}).items():
            writer.parts[name] = {"kind": "staleness" if name == "staleness" else "channel", "text": text}
        versions = [
            f"{group}.{name} {number}"
            for group, numbers in published.items()
            for (role, name), number in sorted(numbers.items())
            if number > had[group].get((role, name), 0)  # published by the group itself
        ]
        if versions:
            writer.parts["weights"] = {"kind": "weights", "text": f"versions: {', '.join(versions)}"}

    def load(self, step: Step) -> Callable[[], None]:
        """Read the content, check that it fits, and return a function that restores it. Versions never go back.

        Raises:
            CheckpointMismatch: if the run has other names of state or channels, or a staleness and the step has none,
                or vice versa.
            CheckpointError: if a value of the state cannot be unpickled here.
            DeclarationError: if items passed through a channel already.
        """
        names, saved, generators = pickle.loads(step.read(_STATE))
        if set(names) != {str(name) for name in self._state}:
            raise CheckpointMismatch(
                f"the driver's state was saved as {', '.join(names) or 'nothing'} and is "
                f"{', '.join(map(str, self._state)) or 'nothing'} now; give {_VERB}(state=) the same names"
            )
        values: dict[str, Any] = {}
        for name, data in saved.items():
            try:
                values[name] = pickle.loads(data)
            except Exception as error:
                raise CheckpointError(
                    f"{name!r} of the driver's state cannot be read here: {error}"
                ) from error
        content = self._read_channels(step) if _CHANNELS in step.files else self._read_format_1(step)

        def put() -> None:
            if content["flow"]:
                restore(content["flow"], [*self._channels.values()], self._staleness)
            for versions in (content["published"], content["had"]):
                for name, group in self._groups.items():
                    numbers = group.core.published_weights
                    for key, number in versions.get(name, {}).items():
                        numbers[key] = max(number, numbers.get(key, 0))
            self._owner.load_state_dict(values)
            if isinstance(generators.get("torch"), bytes):  # format 1
                generators["torch"] = torch.frombuffer(bytearray(generators["torch"]), dtype=torch.uint8)
            _generators().load_state_dict(generators)  # last: loading may draw random numbers

        return put

    def _read_channels(self, step: Step) -> Mapping[str, Any]:
        content = pickle.loads(step.read(_CHANNELS))
        if set(content["channels"]) != self._channels.keys():
            raise CheckpointMismatch(
                f"the run was saved with channels {_names(content['channels'])} and has {_names(self._channels)}; give "
                "it channels of the same names"
            )
        if content["staleness"] != (self._staleness is not None):
            had, has = ("a", "no") if content["staleness"] else ("no", "a")
            raise CheckpointMismatch(f"the run was saved with {had} staleness and has {has} staleness=")
        used = [f"channel {name!r}" for name, channel in self._channels.items() if channel.items.submitted]
        if self._staleness is not None and self._staleness.stats.rows.submitted:
            used.append("the staleness")
        if used:
            raise DeclarationError(
                f"run.resume: {used[0]} cannot be restored, for it was used already; resume before anything moves"
            )
        return content

    def _read_format_1(self, step: Step) -> Mapping[str, Any]:
        saved = _Format1(io.BytesIO(step.read(_CHANNELS_OF_FORMAT_1))).load()
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
        return {"flow": b"", "published": versions[0], "had": versions[1]}


class _Format1(pickle.Unpickler):
    """Reads the file of format 1, whose class is gone."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "phalanx.checkpoint.flow_state":
            return type(global_name, (), {})
        try:
            return super().find_class(module_name, global_name)
        except (ImportError, AttributeError):
            return type(global_name, (), {"__init__": lambda self, *args: None})


def _generators() -> Generators:
    return Generators("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
