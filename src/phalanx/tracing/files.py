"""Files of traces: the suffix chooses the format; ``.json`` and ``.jsonl`` can be read back.

Both contain the events as JSON objects: the head, then tracks, calls, spans and counters. Times are relative to the
start of the trace, so that files of long runs stay small.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing import chrome, html
from phalanx.tracing.events import PART_TIMES, Counter, RankSpan, Span, Trace, TracedCall, Track, TrackKey

_FORMAT = "phalanx-trace"
_VERSION = 3
_HEAD = ("began", "ended", "host", "pid", "title", "notes")
_KINDS = {"track": Track, "call": TracedCall, "span": Span, "counter": Counter}
_TIMES = {"began", "planned", "sent", "asked", "ended", "opened", "closed", *PART_TIMES}
_PART_FIELDS = tuple(field.name for field in fields(RankSpan))


def check_path(path: Path) -> None:
    """Check that the suffix names a format.

    Raises:
        DeclarationError: if the suffix is unknown.
    """
    if path.suffix not in (".json", ".jsonl", ".html"):
        raise DeclarationError(
            f"{path}: the suffix of a trace's file names its format; expected .json (for Perfetto), .jsonl or .html"
        )


def check_writable(path: Path) -> None:
    """Create the folder of a trace, and check that it is writable.

    Raises:
        DeclarationError: if it is not writable, with the system's reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise DeclarationError(
            f"{path}: the trace could not be written there when it ends: {error.strerror or error}; expected a path "
            "in a folder that this process may write to"
        ) from error


def write(trace: Trace, path: Path, charts: Mapping[str, Sequence[float]] | None = None) -> Path:
    """Write a trace, completely or not at all, and return ``path``. ``charts`` are curves for an HTML report.

    Raises:
        DeclarationError: if the suffix is unknown.
        OSError: if the file cannot be written.
    """
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pieces: Iterable[str]
    if path.suffix == ".html":
        pieces = [html.to_html(trace, charts)]
    elif path.suffix == ".json":
        pieces = chrome.to_chrome(trace, entries(trace))
    else:
        pieces = (json.dumps(entry, separators=(",", ":"), default=str) + "\n" for entry in entries(trace))
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(pieces)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load(path: Path) -> Trace:
    """Read a trace from a ``.json`` or ``.jsonl`` file.

    Raises:
        DeclarationError: if the file is not a trace of Phalanx, or its format cannot be read back.
        OSError: if the file cannot be read.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise DeclarationError(
            f"{path}: expected a trace that px.trace wrote as .json or .jsonl; the other formats are for viewers only"
        )
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n") if path.suffix == ".jsonl" else [text]
        content: list[Any] = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:  # of JSON or of UTF-8
        raise DeclarationError(f"{path} is not valid JSON, or was truncated: {error}") from error
    if path.suffix == ".json" and content:
        content = content[0].get("phalanx", []) if isinstance(content[0], dict) else []
    return from_entries(content, str(path))


def entries(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a trace as plain data: its head, then tracks, calls, spans and counters."""
    yield {"kind": _FORMAT, "version": _VERSION, **{name: getattr(trace, name) for name in _HEAD}}
    for kind in _KINDS:
        for event in getattr(trace, f"{kind}s"):
            yield {"kind": kind, **_data(event, trace.began)}


def _data(event: Any, zero: int) -> dict[str, Any]:
    """Return the fields of an event; times are relative to ``zero``, and parts of calls are lists of their values."""
    data = {field.name: getattr(event, field.name) for field in fields(event)}
    data |= {name: None if data[name] is None else data[name] - zero for name in _TIMES & data.keys()}
    if isinstance(event, TracedCall):
        data["parts"] = [list(_data(part, zero).values()) for part in event.parts]
    elif isinstance(event, Counter):
        data["at"] = [time - zero for time in event.at]
    return data


def from_entries(entries: Iterable[dict[str, Any]], where: str) -> Trace:
    """Return the trace from the output of :func:`entries`; entries of unknown kinds are left out.

    Raises:
        DeclarationError: if the entries are not a trace of this version; the message names their source, ``where``.
    """
    head, *found = [*entries] or [{}]
    if not isinstance(head, dict) or head.get("kind") != _FORMAT:
        raise DeclarationError(f"{where} is not a trace; expected a file that px.trace(...) wrote")
    try:
        if head["version"] != _VERSION:
            raise DeclarationError(
                f"{where} was written by another version of phalanx (format {head['version']}, here {_VERSION}); read "
                "it with that version"
            )
        known: dict[str, Any] = {name: head[name] for name in _HEAD} | {"notes": tuple(head["notes"])}
        for kind, made in _KINDS.items():
            known[f"{kind}s"] = tuple(
                _event(made, data, head["began"]) for data in found if data["kind"] == kind
            )
        return Trace(**known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DeclarationError(
            f"{where} is not a trace of phalanx, or it is damaged: {type(error).__name__}: {error}"
        ) from error


def _event(kind: type, data: dict[str, Any], zero: int) -> Any:
    """Return the event of type ``kind`` from the output of :func:`_data`."""
    values = {name: value for name, value in data.items() if name != "kind"}
    values |= {name: None if data[name] is None else data[name] + zero for name in _TIMES & data.keys()}
    values |= {name: tuple(data[name]) for name in ("accelerators", "sources") if name in data}
    values |= {name: TrackKey(*data[name]) for name in ("key", "track") if data.get(name) is not None}
    if kind is TracedCall:
        parts = (dict(zip(_PART_FIELDS, part, strict=False)) for part in data["parts"])
        values["parts"] = tuple(_event(RankSpan, part, zero) for part in parts)
    elif kind is Counter:
        values["at"] = tuple(time + zero for time in data["at"])
        values["values"] = {name: tuple(numbers) for name, numbers in data["values"].items()}
    return kind(**values)
