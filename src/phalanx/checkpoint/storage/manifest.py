"""What a saved step consists of, as a value: the file whose appearance makes the step whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.errors import CheckpointCorrupted

MANIFEST = "manifest.json"
FORMAT = 1


class FileFacts(NamedTuple):
    """Size in bytes, and digest (xxh3, 128 bits, as hexadecimal digits) of one file."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """All files of a step, and what its parts say of themselves.

    Attributes:
        step: its number, as the caller counts.
        serial: of its commit among all of the path, from 1: the last one is where a run goes on.
        at: when it was committed, in seconds since 1970 of the driver's clock.
        seconds: from when it was opened to its commit.
        files: by name, relative to the step's folder, with "/" between folders.
        parts: what each part says of itself: plain data, by name of the part.
    """

    step: int
    serial: int
    at: float
    seconds: float
    files: Mapping[str, FileFacts] = field(default_factory=dict[str, FileFacts])
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def nbytes(self) -> int:
        """Of all files together."""
        return sum(facts.size for facts in self.files.values())

    def to_bytes(self) -> bytes:
        """As a file, with a digest of itself."""
        body = _body(
            {
                "format": FORMAT,
                "step": self.step,
                "serial": self.serial,
                "at": self.at,
                "seconds": self.seconds,
                "files": {name: list(self.files[name]) for name in sorted(self.files)},
                "parts": dict(self.parts),
            }
        )
        return json.dumps({"digest": digest(body.encode()), "manifest": json.loads(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str = MANIFEST) -> Manifest:
        """What :meth:`to_bytes` gave.

        Raises:
            CheckpointCorrupted: it is not what was written, or a later version of the library wrote it.
        """
        try:
            outer = json.loads(data)
            body = outer["manifest"]
            written, version = outer["digest"], body["format"]
        except (ValueError, KeyError, TypeError):
            raise CheckpointCorrupted(f"{where} is damaged: it is not a manifest", files=(where,)) from None
        if version != FORMAT:
            raise CheckpointCorrupted(
                f"{where} has format {version!r}; this version of phalanx reads format {FORMAT}: load it with the "
                "version that wrote it",
                files=(where,),
            )
        if digest(_body(body).encode()) != written:
            raise CheckpointCorrupted(
                f"{where} is damaged: its digest is not that of its text", files=(where,)
            )
        files = {name: FileFacts(*facts) for name, facts in body["files"].items()}
        return cls(body["step"], body["serial"], body["at"], body["seconds"], files, body["parts"])


def _body(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def digest(data: bytes) -> str:
    """The digest of a file's content."""
    from xxhash import xxh3_128_hexdigest  # loaded where something is saved or loaded: nothing else needs it

    return xxh3_128_hexdigest(data)
