"""The folder of a run: on a file system, or in a store that fsspec reaches ("s3://bucket/run")."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import secrets
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeAlias

from xxhash import xxh3_128, xxh3_128_hexdigest

from phalanx.errors import CheckpointError, PhalanxError

PathOrUrl: TypeAlias = str | os.PathLike[str]
"""An absolute or relative path, or a URL that fsspec knows."""

_BLOCK = 8 << 20
_ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf", "memory"}
"""Stores whose files appear complete. Files of others (``sftp://``, ``hdfs://``) are visible while they grow."""
_LOST_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/[^/]")
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some of it, or keep fewer steps (keep=)",
    errno.EDQUOT: "your quota is used up: free some of it, or keep fewer steps (keep=)",
    errno.EACCES: "this user has no permission for it: choose another path, or change its permissions",
    errno.EPERM: "this user has no permission for it: choose another path, or change its permissions",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EEXIST: "there is a file of that name: choose another path",
}


class FileInfo(NamedTuple):
    """Size in bytes and digest (xxh3, 128 bits, hexadecimal) of a file."""

    size: int
    digest: str

    @classmethod
    def of(cls, data: bytes) -> FileInfo:
        """Return the facts of a file with this content."""
        return cls(len(data), xxh3_128_hexdigest(data))


class Storage:
    """A folder. Names are relative to it, with "/" between folders. Errors are ``CheckpointError`` with advice.

    Attributes:
        root: an absolute path, or a URL.
        is_local: True for a path.

    Raises:
        CheckpointError: if fsspec does not know the URL.
    """

    def __init__(self, path: PathOrUrl) -> None:
        from fsspec import available_protocols, filesystem  # type: ignore[import-untyped]  # slow: not for every driver
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        text = os.fspath(path).removeprefix("file://")
        self.is_local = "://" not in text
        lost = _LOST_SLASH.match(text)
        if lost is not None and lost[1] in available_protocols():
            url = text.replace(":/", "://", 1)
            raise CheckpointError(
                f"{text!r} is a URL that lost a slash, as in pathlib.Path; give it as text: {url!r}"
            )
        if self.is_local:
            text = os.path.abspath(os.path.expanduser(text))
        try:
            # A path may contain the syntax of URLs, such as "::".
            found: tuple[Any, str] = (filesystem("file"), text) if self.is_local else url_to_fs(text)
        except Exception as error:  # some stores look for credentials here, and raise their own errors
            raise CheckpointError(
                f"{text!r} cannot be reached: {error}; give a path, or a URL that fsspec knows"
            ) from error
        self.root = text.rstrip("/")
        self._files, self._base = found[0], found[1].rstrip("/")
        self._is_atomic = text.partition("://")[0] in _ATOMIC

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; none if it does not exist."""
        with contextlib.suppress(FileNotFoundError), storage_errors(self.root, "read"):
            self._files.invalidate_cache()
            found = self._files.ls(self._base, detail=False)
            return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found} - {""})
        return []

    def sizes(self) -> dict[str, int]:
        """Return the size of each file below the folder, by name."""
        with storage_errors(self.root, "read"):
            self._files.invalidate_cache()
            found = self._files.find(self._base, detail=True)
        return {str(path)[len(self._base) + 1 :]: int(info["size"] or 0) for path, info in found.items()}

    def make(self, folder: str) -> None:
        """Create a folder and its parents, if they do not exist."""
        with storage_errors(self._at(folder), "made"):
            self._files.makedirs(self._at(folder), exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        with contextlib.suppress(FileNotFoundError), storage_errors(self._at(name), "read"):
            return self._files.cat_file(self._at(name))
        return None

    def facts(self, name: str) -> FileInfo | None:
        """Return the facts of a file by reading it; None if there is none."""
        with (
            contextlib.suppress(FileNotFoundError),
            storage_errors(self._at(name), "read"),
            self.open(name, "rb") as file,
        ):
            digest, size = xxh3_128(), 0
            block = memoryview(bytearray(_BLOCK))  # reused: new memory is slow
            while count := file.readinto(block):
                digest.update(block[:count])
                size += count
            return FileInfo(size, digest.hexdigest())
        return None

    def missing(self, files: Mapping[str, FileInfo]) -> list[str]:
        """Return the files that are missing or have another size, sorted."""
        sizes = self.sizes()
        return [name for name in sorted(files) if sizes.get(name) != files[name].size]

    def differing(self, files: Mapping[str, FileInfo]) -> list[str]:
        """Return the files that are missing or have other facts, by reading them."""
        return [name for name, facts in files.items() if self.facts(name) != facts]

    def open(self, name: str, mode: str) -> Any:
        """Open a file. Raises the store's own errors."""
        return self._files.open(self._at(name), mode)

    def mark(self, name: str) -> None:
        """Create an empty file, without waiting for the disk."""
        with storage_errors(self._at(name), "written"), self.open(name, "wb"):
            pass

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: a reader sees all of it or none, also after a loss of power."""
        at = self._at(name)
        part = at if self._is_atomic else f"{at}.{secrets.token_hex(4)}.part"
        with storage_errors(at, "written"):
            try:
                self._files.pipe_file(part, data)
                if self.is_local:
                    fsync(part)
                if part != at:
                    self._files.mv(part, at)
            except OSError:
                if part != at:
                    with contextlib.suppress(OSError):
                        self._files.rm_file(part)
                raise
        self.sync(name.rpartition("/")[0])

    def sync(self, folder: str) -> None:
        """Wait until the names in a folder would survive a loss of power."""
        if self.is_local:
            with contextlib.suppress(OSError):  # not every file system can sync a folder
                fsync(self._at(folder))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and its content, if it exists."""
        at = self._at(name)
        with contextlib.suppress(FileNotFoundError), storage_errors(at, "removed"):
            if self.is_local or not glob.has_magic(at):
                self._files.rm(at, recursive=True)
            else:  # rm() would take the path for a pattern
                for path in self._files.find(at):
                    self._files.rm_file(path)


def fsync(path: str) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def storage_errors(path: str, verb: str) -> Generator[None]:
    """Raise errors of files and stores as ``CheckpointError`` with advice.

    Args:
        path: path of the file.
        verb: "read", "written", "made", "locked" or "removed". For "read" and "removed", ``FileNotFoundError`` passes.
    """
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and verb in ("read", "removed"):
            raise
        raise CheckpointError(f"{path} cannot be {verb}: {_advice(error)}") from error


def _advice(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "its folder does not exist; choose a path that all ranks share and that nothing else cleans up"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return _ADVICE.get(error.errno or 0, text)
    return f"{text}; check that this process can reach the store and has the needed permissions"
