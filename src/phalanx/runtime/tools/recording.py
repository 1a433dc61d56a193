"""Files with recorded calls: what is in them, written and read."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.execution.recording import RankRecording, RecordedCall
from phalanx.wire.messages import RUN, RankSetup
from phalanx.wire.names import full_name

_MARK = b"\x93phalanx-call\n"
_FORMAT = 1
_LENGTH = struct.Struct("<HQ")  # format, bytes of the facts


@dataclass(frozen=True)
class Recording:
    """A file with recorded calls.

    Attributes:
        path: the file.
        facts: what it is of, as plain data: group, rank, classes, versions, calls. Read without unpickling anything.
        setup: the place of the rank in its group.
        classes: the encoded ``{role: (class, args, kwargs)}``.
        calls: in the order in which they were made.
    """

    path: Path
    facts: dict[str, Any]
    setup: RankSetup
    classes: bytes
    calls: tuple[RecordedCall, ...]


def name_of(call: RecordedCall) -> str:
    """A call as users name it."""
    method = "run" if call.method == RUN else call.method
    return full_name(call.role, method)


def write_recording(
    path: Path, classes: bytes, names: dict[str, str], recorded: RankRecording, version: str
) -> None:
    """Write a file. ``names`` are those of the classes by role."""
    facts = {
        "phalanx": version,
        "python": recorded.python,
        "torch": recorded.torch,
        "group": recorded.setup.group,
        "rank": recorded.setup.rank,
        "world_size": recorded.setup.world_size,
        "host": recorded.setup.host,
        "classes": names,
        "calls": [
            {"call": name_of(call), "at": call.at, "error": call.error.strip().rpartition("\n")[2]}
            for call in recorded.calls
        ],
        "state": any(call.state is not None for call in recorded.calls),
        "folder": recorded.folder,
        "path": list(recorded.path),
    }
    header = json.dumps(facts).encode()
    setup = replace(recorded.setup, files="", trace="")
    body = pickle.dumps({"setup": setup, "classes": classes, "calls": recorded.calls}, 5)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_MARK + _LENGTH.pack(_FORMAT, len(header)) + header + body)


def read_facts(path: str | Path) -> dict[str, Any]:
    """What a file is of. Nothing is unpickled, so no code of the file runs.

    Raises:
        DeclarationError: there is no such file, or it is no recording that this version reads.
    """
    return _read(Path(path))[0]


def read_recording(path: str | Path) -> Recording:
    """A file with recorded calls. Unpickling it can run any code: only read files whose origin you trust.

    Raises:
        DeclarationError: there is no such file, or it is no recording that this version reads.
    """
    facts, body = _read(Path(path))
    try:
        found = pickle.loads(body)
        return Recording(Path(path), facts, found["setup"], found["classes"], found["calls"])
    except Exception as error:
        raise DeclarationError(
            f"{path}: recorded by phalanx {facts.get('phalanx')} and not readable by this one: "
            f"{type(error).__name__}: {error}; the file may have been cut short"
        ) from error


def _read(path: Path) -> tuple[dict[str, Any], memoryview]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DeclarationError(
            f"{path}: cannot be read: {error.strerror}; expected a file of group.record"
        ) from None
    begin = len(_MARK) + _LENGTH.size
    if not data.startswith(_MARK) or len(data) < begin:
        raise DeclarationError(
            f"{path}: no recorded call (it begins with {data[:8]!r}); expected a file of group.record"
        )
    form, length = _LENGTH.unpack_from(data, len(_MARK))
    if form != _FORMAT:
        raise DeclarationError(
            f"{path}: recorded in format {form}, this version reads format {_FORMAT}; use the phalanx that wrote it"
        )
    try:
        return json.loads(data[begin : begin + length]), memoryview(data)[begin + length :]
    except ValueError:
        raise DeclarationError(f"{path}: the file was cut short; record the call again") from None
