"""Progress bars, which do not change their items."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from rich.console import Console

import phalanx as px
from phalanx.display import progress as module
from tests.support.fault_workers import Trouble


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal on which progress is shown."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(module, "terminal", lambda: console)
    return text


def test_progress_is_not_shown_without_a_terminal_or_if_a_variable_turns_it_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(px.debug.progress(range(3))) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal to rich
    for value in ("0", "false"):
        monkeypatch.setenv("PHALANX_PROGRESS", value)
        assert module.terminal() is None


def test_progress_on_a_terminal_counts_items_up_to_a_known_or_given_total(screen: io.StringIO) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("bad")

    assert list(px.debug.progress(range(3), description="steps")) == [0, 1, 2]
    assert "steps" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    with pytest.raises(ValueError, match="bad"):
        list(px.debug.progress(items(), total=4))
    assert "3/4" in screen.getvalue()
    assert list(px.debug.progress(range(2), description="trainer[0] a[/b]")) == [0, 1]
    assert "trainer[0] a[/b]" in screen.getvalue()  # brackets are not markup


def test_progress_of_a_stream_shows_its_number_of_ranks(here: px.ResourcePool, screen: io.StringIO) -> None:
    group = px.WorkerGroup(here, Trouble, name="workers")
    assert list(px.debug.progress(group.ping.submit().stream())) == [(0, 0), (1, 1), (2, 2)]
    assert list(px.debug.progress(group.ping.stream())) == [(0, 0), (1, 1), (2, 2)]

    assert "workers.ping" in screen.getvalue()
    assert "3/3" in screen.getvalue()


def test_importing_rich_does_not_change_the_state_of_random() -> None:
    script = """
        import random, sys
        from phalanx.display.progress import rich_console
        before = random.getstate()
        assert "rich" not in sys.modules
        rich_console()
        assert random.getstate() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
