"""Folders that steps are written to: of a file system, or of a store that fsspec reaches ("s3://bucket/run")."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Collection, Generator, Iterable
from typing import IO, Any, Protocol

from phalanx.checkpoint.storage.manifest import FileFacts
from phalanx.errors import CheckpointError, PhalanxError

_BLOCK = 4 << 20
_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf", "memory"}
"""Stores whose files appear whole; those of others (``sftp://``, ``hdfs://``, ``local://``) are seen as they grow."""

_LOST_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/[^/]")


class Place(Protocol):
    """A folder. Names are relative to it, with "/" between folders; errors are ``CheckpointError`` with what to do."""

    root: str
    """As others are told it: an absolute path, or a URL."""

    def names(self, folder: str = "") -> list[str]:
        """What lies in a folder, sorted; nothing where it is missing."""
        ...

    def files(self, folder: str) -> list[str]:
        """All files below a folder, sorted, relative to it; nothing where it is missing."""
        ...

    def make(self, folder: str) -> None:
        """Make a folder and those above it, if they are missing."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        ...

    def read(self, name: str) -> bytes | None:
        """A whole file; None where there is none."""
        ...

    def facts(self, name: str) -> FileFacts | None:
        """Size and digest of what lies there now; None where there is no file."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file at once: whoever looks sees all of it or none, also after a loss of power."""
        ...

    def keep(self, name: str) -> None:
        """Return when what was written to a file will be there after a loss of power."""
        ...

    def keep_folders(self, folders: Iterable[str]) -> None:
        """Return when the names in these folders will be there after a loss of power."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all in it, if it is there."""
        ...

    def guarded(self, name: str) -> contextlib.AbstractContextManager[None]:
        """One process at a time is in the block, as far as the place can promise that."""
        ...


def place_at(path: str | os.PathLike[str]) -> Place:
    """The place of a path, or of a URL that fsspec knows.

    Raises:
        CheckpointError: fsspec is not installed, or does not know the URL.
    """
    text = os.fspath(path)
    lost = _LOST_SLASH.match(text)
    if lost is not None and lost[1] in _protocols():
        url = text.replace(":/", "://", 1)
        raise CheckpointError(
            f"{text!r} is a URL that lost a slash, as in pathlib.Path; give it as text: {url!r}"
        )
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return StorePlace(text) if "://" in text else FolderPlace(text)


def _protocols() -> Collection[str]:
    with contextlib.suppress(ImportError):
        from fsspec import available_protocols  # type: ignore[import-untyped]  # comes with torch; needed only for URLs

        return available_protocols()
    return _WHOLE


class FolderPlace:
    """A folder of a file system that this machine has."""

    def __init__(self, path: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(path))

    def _at(self, name: str) -> str:
        return os.path.join(self.root, *name.split("/")) if name else self.root

    def names(self, folder: str = "") -> list[str]:
        try:
            with _told(self._at(folder), "read"):
                return sorted(os.listdir(self._at(folder)))
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> list[str]:
        top = self._at(folder)
        found = (os.path.join(at, name) for at, _, names in os.walk(top) for name in names)
        return sorted(os.path.relpath(path, top).replace(os.sep, "/") for path in found)

    def make(self, folder: str) -> None:
        with _told(self._at(folder), "made"):
            os.makedirs(self._at(folder), exist_ok=True)

    def size(self, name: str) -> int | None:
        try:
            with _told(self._at(name), "read"):
                return os.stat(self._at(name)).st_size
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes | None:
        try:
            with _told(self._at(name), "read"), open(self._at(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def facts(self, name: str) -> FileFacts | None:
        try:
            with _told(self._at(name), "read"), open(self._at(name), "rb") as file:
                return _facts(file)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        path = self._at(name)
        beside = f"{path}.{secrets.token_hex(4)}.part"
        with _told(path, "written"):
            try:
                with open(beside, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                raise
            _keep_folder(os.path.dirname(path))

    def keep(self, name: str) -> None:
        with _told(self._at(name), "written"):
            number = os.open(self._at(name), os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
            _keep_folder(os.path.dirname(self._at(name)))

    def keep_folders(self, folders: Iterable[str]) -> None:
        for folder in folders:
            _keep_folder(self._at(folder))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _told(self._at(name), "removed"):
            os.unlink(self._at(name))

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError), _told(self._at(folder), "removed"):
            shutil.rmtree(self._at(folder))

    @contextlib.contextmanager
    def guarded(self, name: str) -> Generator[None]:
        import fcntl  # not on every platform that can read what was saved

        with _told(self._at(name), "locked"):
            number = os.open(self._at(name), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks promises less
                fcntl.flock(number, fcntl.LOCK_EX)
            yield
        finally:
            os.close(number)


class StorePlace:
    """A folder of a store that fsspec reaches, where folders may be names only."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # comes with torch; needed only for URLs
        except ImportError as error:
            raise CheckpointError(f"{url!r} is a URL, which needs fsspec: pip install fsspec") from error
        try:
            found: tuple[Any, str] = url_to_fs(url)  # pyright: ignore[reportUnknownVariableType]
        except Exception as error:  # some look for their credentials here, and have errors of their own
            raise CheckpointError(
                f"{url!r} cannot be reached: {error}; give a path, or a URL that fsspec knows"
            ) from error
        self._files, self._base = found
        self._whole = url.partition("://")[0] in _WHOLE
        self.root = url.rstrip("/")
        self._base = self._base.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def names(self, folder: str = "") -> list[str]:
        at = self._at(folder)
        try:
            with _told_by_store(at, "read"):
                self._files.invalidate_cache()
                found = self._files.ls(at, detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(one).rstrip("/").rpartition("/")[2] for one in found} - {""})

    def files(self, folder: str) -> list[str]:
        top = self._at(folder)
        with _told_by_store(top, "read"):
            self._files.invalidate_cache()
            found = [str(one) for one in self._files.find(top)]
        # Names come back as the store writes them, without the protocol.
        cut = len(self._files._strip_protocol(top).rstrip("/")) + 1
        return sorted(one[cut:] for one in found)

    def make(self, folder: str) -> None:
        with _told_by_store(self._at(folder), "made"):
            self._files.makedirs(self._at(folder), exist_ok=True)

    def size(self, name: str) -> int | None:
        try:
            with _told_by_store(self._at(name), "read"):
                self._files.invalidate_cache()
                return int(self._files.size(self._at(name)))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes | None:
        try:
            with _told_by_store(self._at(name), "read"):
                return self._files.cat_file(self._at(name))
        except FileNotFoundError:
            return None

    def facts(self, name: str) -> FileFacts | None:
        try:
            with _told_by_store(self._at(name), "read"), self._files.open(self._at(name), "rb") as file:
                return _facts(file)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        at = self._at(name)
        with _told_by_store(at, "written"):
            if self._whole:
                self._files.pipe_file(at, data)
                return
            beside = f"{at}.{secrets.token_hex(4)}.part"
            try:
                self._files.pipe_file(beside, data)
                self._files.mv(beside, at)
            except OSError:
                with contextlib.suppress(OSError):
                    self._files.rm_file(beside)
                raise

    def keep(self, name: str) -> None:
        """What such a store has taken, it keeps."""

    def keep_folders(self, folders: Iterable[str]) -> None:
        """Likewise."""

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _told_by_store(self._at(name), "removed"):
            self._files.rm_file(self._at(name))

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError), _told_by_store(self._at(folder), "removed"):
            self._files.rm(self._at(folder), recursive=True)

    def guarded(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Such stores lock nothing: what is written under a lock is read again instead."""
        return contextlib.nullcontext()


def file_facts(path: str) -> FileFacts:
    """Size and digest of a file, by path or URL, once it will be there after a loss of power.

    For ranks, which tell the driver what they wrote.

    Raises:
        CheckpointError: it cannot be read.
    """
    folder, _, name = path.rpartition("/")
    place = place_at(folder or "/")
    place.keep(name)
    facts = place.facts(name)
    if facts is None:
        raise CheckpointError(f"{path} was written and is not there any more")
    return facts


def _facts(file: IO[bytes]) -> FileFacts:
    from xxhash import xxh3_128  # loaded where something is saved or loaded: nothing else here needs it

    text, count = xxh3_128(), 0
    while block := file.read(_BLOCK):
        text.update(block)
        count += len(block)
    return FileFacts(count, text.hexdigest())


def _keep_folder(path: str) -> None:
    """A name in a folder is kept by the folder, which not every file system can be asked for."""
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


_ADVICE = {
    errno.ENOSPC: "the disk is full: free some of it, or keep fewer steps (keep=)",
    errno.EDQUOT: "your quota is used up: free some of it, or keep fewer steps (keep=)",
    errno.EACCES: "this user has no right to it: choose another path, or change its rights",
    errno.EPERM: "this user has no right to it: choose another path, or change its rights",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EEXIST: "there is a file of that name: choose another path",
}


@contextlib.contextmanager
def _told(path: str, what: str) -> Generator[None]:
    """Errors of files with what to do about them; that something is not there to be read is the caller's to judge."""
    try:
        yield
    except FileNotFoundError as error:
        if what in ("read", "removed"):
            raise
        raise CheckpointError(
            f"{path} cannot be {what}: its folder is gone; does something else clean up there?"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {what}: {advice(error)}") from error


@contextlib.contextmanager
def store_errors(path: str, what: str) -> Generator[None]:
    """Errors that are a store's own, such as for missing credentials, with what to do; those of files pass."""
    try:
        yield
    except (OSError, PhalanxError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be {what}: {type(error).__name__}: {error}; see whether this process reaches the store, "
            "and has the rights that it needs there"
        ) from error


@contextlib.contextmanager
def _told_by_store(path: str, what: str) -> Generator[None]:
    with _told(path, what), store_errors(path, what):
        yield


def advice(error: OSError) -> str:
    """What went wrong with a file, and what to do about it."""
    return _ADVICE.get(error.errno or 0, f"{type(error).__name__}: {error}")
