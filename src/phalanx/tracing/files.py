"""Traces as files: the suffix chooses the format."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing import chrome, html
from phalanx.tracing.entries import from_entries
from phalanx.tracing.events import Trace

CHROME, LINES, HTML = ".json", ".jsonl", ".html"
SUFFIXES = (CHROME, LINES, HTML)
_PERFETTO = (".pftrace", ".perfetto-trace")


def check_path(path: Path) -> None:
    """Raise unless a trace can be written in the format that the suffix names.

    Raises:
        DeclarationError: no such format.
    """
    if path.suffix in _PERFETTO:
        raise DeclarationError(
            f"{path}: Perfetto opens traces that end in .json, so name it {path.stem}.json"
        )
    if path.suffix not in SUFFIXES:
        raise DeclarationError(
            f"{path}: the suffix of a trace's file names its format; expected one of {', '.join(SUFFIXES)}"
        )


def check_writable(path: Path) -> None:
    """Raise unless a file can be made beside where a trace is to be written; makes the folder.

    Raises:
        DeclarationError: it cannot, with the system's reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise DeclarationError(
            f"{path}: the trace could not be written there when it ends: {error.strerror or error}; expected a path "
            "in a folder that this process may write to"
        ) from error


def write(trace: Trace, path: Path, charts: Mapping[str, Sequence[float]] | None = None) -> Path:
    """Write a trace; the file is there as a whole or not at all. ``charts`` are curves for an HTML report.

    Raises:
        DeclarationError: as :func:`check_path`.
        OSError: the file cannot be written.
    """
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(_texts(trace, path.suffix, charts or {}))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _texts(trace: Trace, suffix: str, charts: Mapping[str, Sequence[float]]) -> Iterator[str]:
    if suffix == HTML:
        return html.to_html(trace, charts)
    return chrome.to_chrome(trace) if suffix == CHROME else chrome.to_jsonl(trace)


def load(path: Path) -> Trace:
    """The trace in a file that was written as ``.json`` or ``.jsonl``.

    Raises:
        DeclarationError: it is not a trace of phalanx, or one in a format that cannot be read back.
        OSError: it cannot be read.
    """
    if path.suffix not in (CHROME, LINES):
        raise DeclarationError(
            f"{path}: expected a trace that px.trace wrote as .json or .jsonl; the other formats are for viewers only"
        )
    return from_entries(_entries(path), str(path))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == LINES:
                yield from (json.loads(line) for line in file if line.strip())
            else:
                content = json.load(file)
                yield from content.get("phalanx", ()) if isinstance(content, dict) else ()
    except (ValueError, UnicodeDecodeError) as error:
        raise DeclarationError(f"{path} is no JSON, or it was cut off: {error}") from error
