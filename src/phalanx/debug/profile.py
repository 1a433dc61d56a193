"""``group.profile``: profiler traces of the next calls of some ranks."""

from __future__ import annotations

import itertools
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.api.selection import Selection
from phalanx.calls.call import Call
from phalanx.calls.run_on import run_on
from phalanx.debug.rank_profile import ProfileOrder, ProfileReport, arm_profile, end_profile
from phalanx.errors import DeclarationError, DispatchError, PhalanxError
from phalanx.members.recovery import ensure_ready
from phalanx.wire.value import checked_choice, checked_number

_TOOLS = ("torch", "nsys")
_SHORT_WAIT_S = 1.0


def nsight_environment(**options: str) -> dict[str, Any]:
    """Return the ``runtime_env`` of a group that ``group.profile(tool="nsys")`` can profile with Nsight Systems.

    ``nsys`` must be installed on the nodes. The ranks start under ``nsys``, which records only the profiled calls.

    Args:
        **options: further options of ``nsys profile``, by their long names, such as ``gpu_metrics_devices="all"``.
    """
    chosen = {
        "t": "cuda,cudnn,cublas,nvtx,osrt",
        "o": "'worker_process_%p'",
        "stop-on-exit": "true",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",
    }
    return {"nsight": chosen | {name.replace("_", "-"): value for name, value in options.items()}}


class Profile:
    """A running profile, and its traces once it has ended; ``group.profile`` returns it.

    As a context manager, a profile ends with the block, even if the block raises. Otherwise ``wait()``, or reading
    ``paths``, ends it. If the group is closed or restarted, the traces are fetched first.

    Attributes:
        folder: folder of the traces, on this machine.
        calls: the profiled calls of each rank, by name; empty until the profile has ended.
        notes: deviations from the request, with reasons: calls that raised, ranks without a trace.
    """

    def __init__(self, selection: Selection, ranks: Sequence[int], folder: Path, order: ProfileOrder) -> None:
        self.folder = folder
        self._core = core = selection.core
        self._name = selection.name
        self._ranks = ranks
        self._order = order
        self._epoch = core.epoch
        self._key = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._over = False
        self.calls: dict[int, tuple[str, ...]] = {}
        self.notes: tuple[str, ...] = ()
        self._paths: dict[int, Path] = {}
        armed = self._run(arm_profile, self._key, order, ranks=self._ranks)
        core.before_end.append(self._end)
        try:
            _check_refusals(core.name, armed)
        except BaseException:
            core.before_end.remove(self._end)
            # disarms ranks that did not refuse; the others have nothing to end
            self._run(end_profile, self._key, ranks=self._ranks).arrivals.disregard()
            raise

    def _run(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int]) -> Call:
        return run_on(
            self._core, function, *args, ranks=ranks, title="profile", checked=False, epoch=self._epoch
        )

    def wait(self, timeout: float | None = None) -> tuple[Path, ...]:
        """Wait until the calls in progress have ended, end the profile, and fetch the traces.

        Further calls are not awaited. If fewer calls than requested were made, ``str(profile)`` says so.

        Args:
            timeout: seconds to wait for ranks with a running call, which are left out then; None: no limit.

        Returns:
            The trace files on this machine, by rank: Chrome's JSON, gzipped, for https://ui.perfetto.dev or
            chrome://tracing. A rank without a call has no file.
        """
        self._end(timeout)
        return tuple(self._paths.values())

    @property
    def paths(self) -> tuple[Path, ...]:
        """The trace files. Reading it ends the profile, as :meth:`wait` does."""
        return self.wait()

    def _end(self, timeout: float | None) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            core = self._core
            if self._end in core.before_end:
                core.before_end.remove(self._end)
            if core.endpoints:  # else the known ranks are about to end, and there are no new ranks yet
                self._epoch = core.epoch
            there = self._epoch.endpoints
            dead = core.backend.dead_of(there)
            alive = [rank for rank in self._ranks if rank < len(there) and rank not in dead]
            for rank in set(self._ranks) - set(alive):
                self._note(rank, "ended, and its trace was lost with it")
            answers = self._run(end_profile, self._key, ranks=alive).answers(timeout) if alive else {}
            for rank, answer in answers.items():
                if isinstance(answer, ProfileReport):
                    self._save(rank, answer)
                else:
                    self._note(rank, f"no trace: {answer}")

    def _note(self, rank: int, text: str) -> None:
        self.notes += (f"rank {rank}: {text}",)

    def _save(self, rank: int, report: ProfileReport) -> None:
        self.calls[rank] = tuple(report.calls)
        for failure in report.failed:
            self._note(rank, f"{failure} was raised")
        if report.note:
            self._note(rank, report.note)
        if len(report.calls) < self._order.calls:
            self._note(rank, f"{len(report.calls)} of {self._order.calls} calls were made")
        if report.trace is not None:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", self._name)
            numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
            paths = (self.folder / f"{name}-rank{rank}{number}.pt.trace.json.gz" for number in numbers)
            try:
                path = next(path for path in paths if not path.exists())
                path.write_bytes(report.trace)
                self._paths[rank] = path
            except OSError as error:
                self._note(rank, f"its trace was not written: {error}")
        elif self._order.tool == "nsys" and report.calls:
            facts = self._epoch.endpoints[rank].facts
            reports = Path(facts.folder).parent / "nsight" / f"worker_process_{facts.pid}*.nsys-rep"
            self._note(rank, f"Nsight Systems writes {reports} on host {facts.slot.host}")

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(None if error is None else _SHORT_WAIT_S)

    def __str__(self) -> str:
        if not self._over:
            return f"<Profile of group {self._core.name!r}, ranks {list(self._ranks)}: running>"
        lines = [f"{path} ({len(self.calls[rank])} calls)" for rank, path in self._paths.items()]
        return "\n".join([*lines, *self.notes]) or "no trace"

    __repr__ = __str__


def start_profile(
    selection: Selection,
    ranks: Sequence[int] | None,
    calls: int,
    folder: str | Path | None,
    tool: str,
    options: dict[str, Any],
) -> Profile:
    """Start a profile, from the next call of the ranks on; see ``group.profile``."""
    checked_choice(f"{selection.name}.profile: tool", tool, _TOOLS)
    ensure_ready(selection.core)
    selection.core.check()
    calls = checked_number(f"{selection.name}.profile: calls", calls, 1, error=DispatchError)
    chosen = selection.chosen_ranks("profile", selection.ranks[:1] if ranks is None else ranks)
    selection.check_there("profile", chosen)
    where = Path(tempfile.mkdtemp(prefix="phalanx-profile-") if folder is None else folder)
    order = ProfileOrder(calls, selection.role, tool, options)
    where.mkdir(parents=True, exist_ok=True)
    try:
        return Profile(selection, chosen, where.absolute(), order)
    except BaseException:
        if folder is None:
            where.rmdir()
        raise


def _check_refusals(group: str, armed: Call) -> None:
    """Raise the error of a rank that refused the profile, or failed; a busy rank may still refuse later."""
    errors = [answer for answer in armed.answers(_SHORT_WAIT_S).values() if isinstance(answer, PhalanxError)]
    for error in sorted(errors, key=lambda error: not isinstance(error, DeclarationError)):
        raise type(error)(f"group {group!r}, {error}")
