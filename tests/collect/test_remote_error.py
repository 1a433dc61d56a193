"""The error of a failed call is also an instance of the worker's exception type, if possible."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import importlib
import os
import pickle
import subprocess
import sys
import traceback
import weakref
from pathlib import Path

import pytest

import phalanx
from phalanx.collect.failures import remote_error
from phalanx.errors import GroupClosed, RemoteCallError
from phalanx.wire.failure import capture, report_of
from tests.support.odd_exceptions import Frozen, OtherArguments, Slotted

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

TEXT = "group 'actor', method update: rank 1 raised something"


@dataclasses.dataclass
class Comparing(Exception):
    code: int


class SameNames(Exception):
    """Uses attribute names of the library for other values."""

    def __init__(self) -> None:
        super().__init__("text")
        self.group = "mine"
        self.ranks = "mine"
        self._text = "mine"
        self._group = "mine"


class OnlyRead(Exception):
    @property
    def rank(self) -> int:
        return 7


class OwnReduce(Exception):
    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("not pickled")


class TwoBases(KeyError, LookupError):
    pass


class Unreadable(Exception):
    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(f"no {name}")


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


def failed_with(*excs: BaseException) -> RemoteCallError:
    failures = tuple(report_of(capture(exc, rank=rank)) for rank, exc in enumerate(excs))
    return remote_error(RemoteCallError, TEXT, group="actor", method="update", failures=failures)


EXCEPTIONS = [
    KeyError("k"),
    TwoBases("k"),
    FileNotFoundError(2, "No such file", "/x"),
    BlockingIOError(11, "again", 5),
    SyntaxError("bad", ("f.py", 3, 1, "x =", 3, 2)),
    ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    OtherArguments(3, reason="why"),
    Frozen(3),
    Comparing(3),
    SameNames(),
    OnlyRead("x"),
    Slotted(3),
    OwnReduce("x"),
    subprocess.CalledProcessError(3, ["ls"], output=b"out"),
    Exception("plain"),
]


@pytest.mark.parametrize("exc", EXCEPTIONS, ids=lambda exc: type(exc).__name__)
def test_the_error_and_its_copies_have_both_types_and_the_text_and_fields_of_the_library(
    exc: Exception,
) -> None:
    error = failed_with(exc)

    assert isinstance(error, RemoteCallError)
    assert isinstance(error, type(exc))
    assert (str(error), error.group, error.method, error.ranks) == (TEXT, "actor", "update", (0,))
    assert TEXT in "".join(traceback.format_exception(type(error), error, None))
    error.anything, error.__notes__ = 1, ["mine"]  # type: ignore[attr-defined]
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), again.failures, again.__notes__) == (TEXT, error.failures, ["mine"])
    with pytest.raises(type(exc)) as caught:
        raise error
    assert {caught.value} == {error}
    assert error != failed_with(exc)


@pytest.mark.parametrize(
    "exc",
    [
        *(KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), GeneratorExit()),
        *(StopIteration(1), StopAsyncIteration(), Final("x")),
        *(GroupClosed("another group"), RemoteCallError("nested")),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_exceptions_that_must_not_or_cannot_be_subclassed_give_a_plain_error(exc: BaseException) -> None:
    error = failed_with(exc)

    assert (type(error), str(error)) == (RemoteCallError, TEXT)


def test_an_exception_that_refuses_every_attribute_gives_a_plain_error_with_its_class_name() -> None:
    error = failed_with(Unreadable("x"))

    assert (type(error), error.failures[0].type_name) == (RemoteCallError, f"{__name__}.Unreadable")


def test_an_error_that_came_through_another_group_keeps_its_remote_type() -> None:
    inner = failed_with(OtherArguments(3, reason="why"))

    outer = pickle.loads(pickle.dumps(failed_with(inner)))

    assert isinstance(outer, OtherArguments)
    assert (outer.reason, str(outer)) == ("why", TEXT)


def test_the_first_cause_decides_the_type_and_a_victim_does_not() -> None:
    assert isinstance(failed_with(ValueError(), KeyError()), ValueError)

    victim = dataclasses.replace(report_of(capture(RuntimeError("closed"), rank=0)), victim=True)
    cause = report_of(capture(KeyError("k"), rank=1))
    error = remote_error(RemoteCallError, TEXT, group="g", method="m", failures=(victim, cause))

    assert isinstance(error, KeyError)


def test_an_error_of_a_missing_class_is_unpickled_as_a_plain_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("class Gone(ValueError):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = pickle.dumps(failed_with(importlib.import_module("only_here").Gone("text")))
    code = (
        "import pickle, sys; error = pickle.loads(sys.stdin.buffer.read());"
        "print(type(error).__name__, error.ranks, error.failures[0].type_name); print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(phalanx.__file__).parent.parent)}

    said = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, env=environment)

    assert said.stdout.decode().splitlines() == ["RemoteCallError (0,) only_here.Gone", TEXT]


def test_an_error_made_while_another_is_handled_holds_no_frames_of_the_driver() -> None:
    class Argument: ...

    def make() -> tuple[RemoteCallError, weakref.ref[Argument]]:
        argument = Argument()
        try:
            raise ValueError(argument)
        except ValueError:
            return failed_with(OtherArguments(3, reason="full")), weakref.ref(argument)

    gc.disable()
    try:
        error, argument = make()
        assert argument() is None
    finally:
        gc.enable()
    assert (error.__traceback__, error.__context__) == (None, None)
