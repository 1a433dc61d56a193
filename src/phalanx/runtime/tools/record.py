"""``group.record``: the next calls of one rank with their inputs, in a file that ``phalanx replay`` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from phalanx.declare.bind import ClassWithInitArgs
from phalanx.errors import DeclarationError
from phalanx.execution.hooks import Wanted
from phalanx.execution.recording import RankRecording, RecordOrder, arm_recording, end_recording
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.calls.values import Readonly, StoredValue
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.groups.selection import Selection
from phalanx.runtime.tools.capture import Capture
from phalanx.runtime.tools.profile import check_calls
from phalanx.runtime.tools.recording import name_of, write_recording
from phalanx.wire.codec import encode


class Record(Capture):
    """A recording under way, and then its file. Made by ``group.record``.

    As a context manager it ends with the block, also with one that raises. Otherwise ``wait()``, or asking for
    ``path``, ends it; when the group closes or restarts, what was recorded by then is written by itself.
    """

    verb = "record"
    lost_with_rank = "what it recorded"
    after_error_s = 5.0

    def __init__(
        self,
        core: GroupCore,
        rank: int,
        path: Path,
        order: RecordOrder,
        classes: dict[str, ClassWithInitArgs],
    ) -> None:
        super().__init__(core, [rank])
        self.rank = rank
        self._path = path
        self._order = order
        self._classes = classes
        self._written = False
        self._calls: tuple[str, ...] = ()
        self._begin(arm_recording, end_recording, order)

    def wait(self, timeout: float | None = None) -> Path | None:
        """Wait until the calls that were made have ended, end the recording, and write the file.

        Args:
            timeout: seconds to wait for the rank where it is still at a call; then there is no file.

        Returns:
            The file on this machine; None where no call was recorded: ``notes`` say why.
        """
        self._end(timeout)
        return self._path if self._written else None

    @property
    def path(self) -> Path | None:
        """The file; ends the recording if that has not been done, as :meth:`wait` does."""
        return self.wait()

    @property
    def calls(self) -> tuple[str, ...]:
        """The recorded calls by name; empty until the recording has ended."""
        return self._calls

    def _fetch(self, ranks: Sequence[int], timeout: float | None) -> None:
        answer = self._ended_on(ranks, end_recording).answers(timeout)[self.rank]
        if isinstance(answer, RankRecording):
            self._write(answer)
        else:
            self._notes.append(str(answer))

    def _write(self, recorded: RankRecording) -> None:
        self._notes += recorded.notes
        self._calls = tuple(name_of(call) for call in recorded.calls)
        if not recorded.calls:
            kind = "raised" if self._order.when == "error" else "was made"
            self._notes.append(f"no call {kind} on rank {self.rank}")
            return
        names = {role: f"{one.cls.__module__}.{one.cls.__qualname__}" for role, one in self._classes.items()}
        write_recording(
            self._path, encoded_classes(self._classes), names, recorded, metadata.version("phalanx")
        )
        self._written = True

    def __repr__(self) -> str:
        if not self._over:
            return f"<Record of group {self._core.name!r}, rank {self.rank}: under way>"
        where = f"{self._path}: {', '.join(self._calls)}" if self._written else "no file"
        return "\n".join([where, *self._notes])


def encoded_classes(classes: dict[str, ClassWithInitArgs]) -> bytes:
    """Classes with the arguments that ranks make them with; values stand in place of futures and references."""
    hoist: dict[type, Any] = {
        CallFuture: CallFuture.result,
        StoredValue: StoredValue.get,
        Readonly: lambda marked: marked.value,
    }
    made = {role: (one.cls, one.args, one.kwargs) for role, one in classes.items()}
    return encode(made, hoist=hoist).to_bytes()


def start_recording(
    selection: Selection,
    path: str | Path,
    rank: int | None,
    methods: Sequence[str | Callable[..., object]] | None,
    calls: int,
    when: Literal["call", "error"],
    state: bool,
) -> Record:
    """Check what was asked for, and have the rank begin with its next call."""
    core = selection.core
    if core.owned is None:
        raise DeclarationError(
            f"{selection.name}.record(): this is a view of a group that another process owns, and only the owner "
            "knows what its workers are made of; record there"
        )
    if when not in ("call", "error"):
        raise DeclarationError(f'{selection.name}.record(when={when!r}): expected "call" or "error"')
    check_calls(f"{selection.name}.record", calls)
    (chosen,) = selection.chosen_ranks("record", None if rank is None else [rank])
    wanted = Wanted(selection.role, selection.method_names("record", methods))
    order = RecordOrder(calls, wanted, when, state)
    return Record(core, chosen, Path(path).absolute(), order, dict(core.owned.made_of))
