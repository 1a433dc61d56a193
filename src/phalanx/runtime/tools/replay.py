"""``px.replay``: one rank's recorded calls run alone, in this process."""

from __future__ import annotations

import functools
import inspect
import os
import pdb
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.execution.host import Host
from phalanx.execution.recording import RecordedCall
from phalanx.execution.rendezvous import REPLAYED_VARIABLE
from phalanx.runtime.tools.recording import Recording, name_of, read_recording
from phalanx.topology.accelerators import mask_variables
from phalanx.topology.slots import SlotFacts
from phalanx.transport.inline import InlineServices
from phalanx.wire.codec import decode, decoding, encode
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import RUN, STORE_VARIABLE
from phalanx.wire.value import Value


def replay(path: str | Path, *, method: str | None = None) -> Value:
    """Run recorded calls again in this process, on a worker made as the rank's was, and give the last one's value.

    The worker knows its rank, the world size, the meshes and the group's variables, but is alone: process groups of
    more than one rank are refused with a message. Where the file has the worker's state, the worker gets it.

    Reading the file unpickles it, which can run any code: only replay files whose origin you trust.

    Args:
        path: what ``group.record`` wrote.
        method: only the calls of this method; default all of the file, in order.

    Raises:
        DeclarationError: the file is no recording, has no such call, or needs a module that is not here.
        Exception: what the worker's constructor or the call raises, as it is.
    """
    with Replay(path) as again:
        return again.run(method=method)


class Replay:
    """Recorded calls, to be run while it is entered: the process then has the rank's variables and import path."""

    def __init__(self, path: str | Path) -> None:
        self.recording: Recording = read_recording(path)
        self._before: dict[str, str | None] = {}
        self._sys_path: list[str] = []

    def __enter__(self) -> Replay:
        self._sys_path = list(sys.path)
        sys.path += _folders(self.recording, sys.path)
        for name, value in self._environment().items():
            self._before[name] = os.environ.get(name)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.path[:] = self._sys_path
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _environment(self) -> dict[str, str | None]:
        """The rank's own variables; not the masks of devices, which this machine may not have."""
        setup = self.recording.setup
        found: dict[str, str | None] = dict(setup.environment)
        for name in mask_variables():
            found.pop(name, None)
        alone = f"rank {setup.rank} of {setup.world_size}"
        if setup.accelerator_ids:
            found["LOCAL_RANK"] = "0"
        return {**found, STORE_VARIABLE: "inline", REPLAYED_VARIABLE: alone}

    def run(self, *, method: str | None = None, debugger: pdb.Pdb | None = None) -> Value:
        """Make the worker, run the calls, give the last one's value.

        Args:
            method: only the calls of this method.
            debugger: stops at the first line of each method that is called.

        Raises:
            As :func:`replay`.
        """
        calls = self._chosen(method)
        host = self._host(calls[0])
        value = None
        for call in calls:
            value = self._call(host, call, debugger)
        return value

    def _chosen(self, method: str | None) -> list[RecordedCall]:
        every = list(self.recording.calls)
        chosen = [c for c in every if method is None or method in (name_of(c), name_of(c).rpartition(".")[2])]
        if not chosen:
            names = ", ".join(dict.fromkeys(map(name_of, every))) or "no call"
            raise DeclarationError(f"{self.recording.path}: no call of {method!r} in it; it has: {names}")
        return chosen

    def _host(self, first: RecordedCall) -> _Alone:
        setup = self.recording.setup
        facts = SlotFacts("replay", socket.gethostname(), "127.0.0.1", (), os.cpu_count())
        host = _Alone(InlineServices(facts, ""))
        made = self._unpickled(self.recording.classes, "the worker's class")
        if first.state is not None:
            made = _with_state(made, self._unpickled(first.state, "the worker's state"))
        place = replace(setup, environment={}, accelerator_ids=(), local_device=0, asynchronous=False)
        try:
            host.setup(place.pack(encode(made).to_bytes()), ())
        except RankFailure as failure:
            raise _cause(failure) from None
        return host

    def _unpickled(self, data: bytes, what: str) -> Value:
        try:
            return decode(data)
        except (ImportError, AttributeError) as error:
            raise DeclarationError(
                f"{self.recording.path}: {what} cannot be loaded here: {error}. It was recorded in "
                f"{self.recording.facts['folder']} with Python {self.recording.facts['python']}; add the folder of its "
                "modules to PYTHONPATH"
            ) from error

    def _call(self, host: _Alone, call: RecordedCall, debugger: pdb.Pdb | None) -> Value:
        device = host.device if call.to_device else None
        with decoding(device=device, every_tensor=device is not None):
            args, kwargs = self._unpickled(call.body, f"an argument of {name_of(call)}")
        function = host.function(call.role, call.method, args)
        args = args[1:] if call.method == RUN else args
        if debugger is None:
            return host.to_end(function, args, kwargs)
        _break_at(debugger, function)
        return debugger.runcall(host.to_end, function, args, kwargs)


class _Alone(Host):
    """A rank without its group."""

    def function(self, role: str, method: str, args: tuple[Any, ...]) -> Callable[..., Any]:
        """What a call calls."""
        target = self._target(role)
        return functools.partial(args[0], target) if method == RUN else getattr(target, method)

    def to_end(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        """Call it; an ``async`` one to its end."""
        result = function(*args, **kwargs)
        return self._loop.to_end(result) if inspect.isawaitable(result) else result


def _with_state(made: dict[str, Any], states: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """The same classes, made into workers in their recorded state."""
    found = dict(made)
    for role, (kind, state) in states.items():
        if kind == "object":
            found[role] = (_Given(state), (), {})
        elif role in found:
            cls, args, kwargs = found[role]
            found[role] = (functools.partial(_loaded, cls, state), args, kwargs)
    return found


class _Given:
    """Stands for a class whose only object is known."""

    def __init__(self, instance: Value) -> None:
        self._instance = instance

    def __call__(self) -> Value:
        return self._instance


def _loaded(cls: Any, state: Value, *args: Value, **kwargs: Value) -> Value:
    instance = cls(*args, **kwargs)
    instance.load_state_dict(state)
    return instance


def _cause(failure: RankFailure) -> BaseException:
    return failure.__context__ or failure


def _folders(recording: Recording, known: list[str]) -> list[str]:
    """Where the rank found its modules, as far as these folders are here too."""
    wanted = [recording.facts["folder"], *recording.facts["path"]]
    return [folder for folder in dict.fromkeys(wanted) if folder not in known and os.path.isdir(folder)]


def _break_at(debugger: pdb.Pdb, function: Callable[..., Any]) -> None:
    """Have the debugger run on to the first line of a function, and stop there.

    Raises:
        DeclarationError: its source is not here.
    """
    inner = function.func if isinstance(function, functools.partial) else function
    code: CodeType | None = getattr(inspect.unwrap(inner), "__code__", None)
    if code is None:
        raise DeclarationError(f"--break: {inner!r} has no Python source to stop in")
    lines = [line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno]
    refused = debugger.set_break(code.co_filename, lines[0] if lines else code.co_firstlineno)
    if refused:
        raise DeclarationError(f"--break: the source of {code.co_name} is not here: {refused}")
    debugger.rcLines.append("continue")  # not to stop in what leads there
