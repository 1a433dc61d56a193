"""Failures of ranks: they can be sent anywhere, and their exceptions are restored if possible."""

from __future__ import annotations

import errno
import importlib
import pickle
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import phalanx
from phalanx.errors import PhalanxError, RankReport, RemoteCallError
from phalanx.wire.exceptions import ITEM_LIMIT, pack, unpack
from phalanx.wire.failure import capture, report_of
from tests.support.odd_exceptions import Frozen, Mute, OtherArguments, Slotted, decode_error

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


class Refuses(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


class Holding(Exception):
    def __init__(self, message: str, kept: object) -> None:
        super().__init__(message)
        self.kept = kept


class Stubborn(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOSPC, "disk full", path)


class Own(PhalanxError):
    """An error of a user in a module that is not importable."""


Own.__module__ = "scripts.train"


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


def there_and_back(exc: BaseException) -> BaseException | None:
    return report_of(pickle.loads(pickle.dumps(capture(exc, rank=1)))).exception


@pytest.mark.parametrize(
    ("exc", "fields"),
    [
        (ValueError("bad", 3), ("args",)),
        (OtherArguments(3, reason="why"), ("args", "code", "reason")),
        (Frozen(3, "there"), ("code", "where")),
        (Slotted(3), ("args", "code")),
        (Refuses("text"), ("args",)),
        (Own("text"), ("args",)),
        (decode_error(), ("args", "encoding", "object", "start", "end", "reason")),
        (FileNotFoundError(2, "No such file", "/x"), ("args", "errno", "strerror", "filename")),
        (OSError(errno.EXDEV, "link", "/a", None, "/b"), ("errno", "filename", "filename2")),
        (Stubborn("/full"), ("args", "errno", "strerror", "filename")),
        (ImportError("no", name="mod", path="/p"), ("args", "name", "path", "msg")),
        (SyntaxError("bad", ("f.py", 3, 1, "x =", 3, 2)), ("args", "filename", "lineno", "text")),
        (StopIteration(5), ("value",)),
        (SystemExit(3), ("code",)),
        (
            RemoteCallError("text", group="g", method="m", failures=(RankReport(1, "raised"),)),
            ("group", "failures"),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_exception_is_restored_with_its_fields(exc: BaseException, fields: tuple[str, ...]) -> None:
    back = there_and_back(raised(exc))

    assert type(back) is type(exc)
    assert [getattr(back, name) for name in fields] == [getattr(exc, name) for name in fields]


@pytest.mark.parametrize(
    ("kept", "note"),
    [(threading.Lock(), "kept (_thread.lock)"), (b"x" * (ITEM_LIMIT + 1), "kept (bytes)")],
    ids=["unpicklable", "too large"],
)
def test_attributes_that_cannot_be_sent_are_left_out_and_named_in_a_note(kept: object, note: str) -> None:
    back = there_and_back(Holding("text", kept))

    assert isinstance(back, Holding)
    assert (back.args, hasattr(back, "kept")) == (("text",), False)
    assert note in back.__notes__[0]
    lost = there_and_back(ValueError("text", threading.Lock()))
    assert lost is not None
    assert lost.args == ("text", "<_thread.lock that could not be sent>")
    assert pack(ValueError(*[b"x" * (ITEM_LIMIT - 100)] * 20)) is None  # too large in all


@given(st.binary(max_size=40))
def test_bytes_that_are_no_exception_are_unpacked_as_none(data: bytes) -> None:
    assert unpack(data) is None


def test_a_sub_exception_without_its_class_is_replaced_by_a_library_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soon_gone.py").write_text("class Gone(ValueError):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = pack(ExceptionGroup("several", [__import__("soon_gone").Gone("text"), KeyError("k")]))
    del sys.modules["soon_gone"]
    (tmp_path / "soon_gone.py").unlink()
    importlib.invalidate_caches()

    back = unpack(data)

    assert isinstance(back, ExceptionGroup)
    assert isinstance(back.exceptions[0], PhalanxError)
    assert str(back.exceptions[0]) == "soon_gone.Gone: text"


def user_code() -> None:
    raise ValueError("bad")


def failing_in_host(call: Callable[[], None]) -> BaseException:
    """Run `call` under a frame of a file in the folder of the worker runtime."""
    host = Path(phalanx.__file__).parent / "worker" / "imagined.py"
    space: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile("def run(call):\n    call()\n", str(host), "exec"), space)
    try:
        space["run"](call)
    except Exception as error:
        # As in the worker runtime, the frame that catches the error is not shown.
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError("the call returned")


@pytest.mark.parametrize(("call", "first"), [(user_code, "in user_code"), (None, "in run")])
def test_the_traceback_begins_in_user_code_if_there_is_any(call: Any, first: str) -> None:
    lines = capture(failing_in_host(call), rank=1).report.traceback.splitlines()

    assert lines[1].endswith(first)


def test_causes_notes_and_sub_exceptions_are_in_the_traceback_and_restored() -> None:
    group = ExceptionGroup(
        "several", [ValueError("first one"), ExceptionGroup("inner", [decode_error(), Refuses("second one")])]
    )
    group.__notes__ = ["a note"]
    group.__cause__ = OtherArguments(1, reason="the reason")

    text = capture(raised(group), rank=1).report.traceback
    back = there_and_back(raised(group))

    assert all(part in text for part in ("first one", "second one", "a note", "the reason", "direct cause"))
    assert isinstance(back, ExceptionGroup)
    assert (back.__notes__, getattr(back.__cause__, "reason", None)) == (["a note"], "the reason")
    inner = back.exceptions[1]
    assert isinstance(inner, ExceptionGroup)
    assert [type(exc) for exc in inner.exceptions] == [UnicodeDecodeError, Refuses]


def test_long_messages_are_shortened_and_mute_or_recursive_errors_are_captured() -> None:
    def again() -> None:
        again()

    with pytest.raises(RecursionError) as raised_here:
        again()
    failure = capture(raised_here.value, rank=1)
    report = capture(ValueError("start" + "x" * 100_000 + "end"), rank=1).report

    mute = capture(raised(Mute("x")), rank=1).report
    assert mute.type_name == f"{Mute.__module__}.Mute"
    assert mute.message == "<str() of this Mute raised RuntimeError>"
    assert "in raised" in mute.traceback
    assert "previous line repeated" in failure.report.traceback.lower()
    assert len(report.message) < 20_000
    assert report.message.startswith("start")
    assert report.message.endswith("end")


def test_exceptions_of_scripts_and_of_the_main_module_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("class Scripted(ValueError):\n    pass\nerror = Scripted('text')\n")
    made = type("OfMain", (ValueError,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "OfMain", made, raising=False)

    back = there_and_back(runpy.run_path(str(script))["error"])

    assert repr(back) == "Scripted('text')"
    assert type(there_and_back(made("text"))) is made


@given(st.text(st.characters(), max_size=20))
@example("\udce9")
def test_all_texts_of_a_failure_can_be_encoded_and_the_exception_keeps_its_text(text: str) -> None:
    error = ValueError(text)
    error.__notes__ = [text]  # type: ignore[attr-defined]
    failure = capture(error, role=text, method=text)
    report = failure.report
    for told in (str(failure), report.message, report.traceback, *report.notes, report.role, report.method):
        (told or "").encode()
    assert "was cancelled: " in str(capture(KeyError(1), kind="cancelled"))
    assert report.message == text.encode("utf-8", "backslashreplace").decode()
    assert str(report_of(failure).exception) == text
