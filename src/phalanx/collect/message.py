"""Error message of a failed call: the failed ranks, their failures and last log lines, and the victims. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from phalanx.display.log_merging import rank_ranges
from phalanx.errors import RankReport

_MAX_RANGES = 12
_MAX_KINDS = 4
_MAX_PLACES = 16
_MAX_STACKS = 4
_LOG_LINES = 20
_TRACEBACK_LINES = 80
# Numbers are ignored in comparisons: addresses and sizes differ between ranks that failed in the same way.
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
# Internal name of ``group.run(...)``, displayed as ``run``.
_OWN = re.compile(r"^__phalanx_(\w+)__$")

#: Reports of ranks that failed in the same way, in order.
Alike = tuple[RankReport, ...]

_MORE_TIME = ".options(timeout=...) for one call, call_timeout= for the group, PHALANX_CALL_TIMEOUT for all"
_MORE_FOR_A_START = "start_timeout= for the group, PHALANX_START_TIMEOUT for all"


def render(
    group: str,
    method: str,
    failures: Sequence[RankReport],
    *,
    timeout: float | None = None,
    init: bool = False,
) -> str:
    """Return the complete message. `failures` are the result of `with_victims`; `timeout` is in seconds."""
    causes = _alike([report for report in failures if report.failed and not report.victim])
    victims = _alike([report for report in failures if report.failed and report.victim])
    finished = [report.rank for report in failures if not report.failed]
    sections = [
        _headline(group, method, causes, timeout, init),
        *_places(causes),
        *_details(causes),
        *_victims(victims, causes),
    ]
    if finished:
        sections.append(f"finished: {rank_list(finished)}")
    if any(report.kind == "timeout" for alike in causes for report in alike):
        sections.append(
            f"If it only needs more time, give it more: {_MORE_FOR_A_START if init else _MORE_TIME}."
        )
    return "\n\n".join(sections)


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as text: `rank 2`, `ranks 0-3, 7`. Long lists are shortened."""
    distinct = set(ranks)
    parts = rank_ranges(distinct)
    shown = ", ".join(parts[:_MAX_RANGES])
    if len(parts) > _MAX_RANGES:
        shown += f", ... ({len(distinct)} in all)"
    return f"rank {shown}" if len(distinct) == 1 else f"ranks {shown}"


def _alike(reports: Sequence[RankReport]) -> list[Alike]:
    groups: dict[tuple[str | None, ...], list[RankReport]] = {}
    for report in reports:
        groups.setdefault(_key(report), []).append(report)
    return [tuple(group) for group in groups.values()]


def _key(report: RankReport) -> tuple[str | None, ...]:
    said = _NUMBER.sub("#", report.message)
    return report.kind, report.type_name, said, report.exit, report.state


def _headline(group: str, method: str, causes: Sequence[Alike], timeout: float | None, init: bool) -> str:
    first = causes[0][0]
    method = _OWN.sub(r"\1", method)
    name = f"{first.role}.{method}" if first.role and "." not in method else method
    what = f"group {group!r}, constructor" if init else f"group {group!r}, method {name}"
    if timeout is not None and first.kind == "timeout":
        what += f", not done after {timeout:g} s"
    lines = [f"{what}: {_who(causes[0])} {_did_all(causes[0])}", *_kinds(causes[1:], _MAX_KINDS - 1, "and ")]
    return "\n".join(lines)


def _kinds(failures: Sequence[Alike], most: int, prefix: str = "") -> Iterator[str]:
    """Yield a line for each of the first `most` kinds of failures, and a line for the other kinds."""
    for alike in failures[:most]:
        yield f"  {prefix}{_who(alike)} {_did_all(alike)}"
    if len(failures) > most:
        rest = rank_list(report.rank for alike in failures[most:] for report in alike)
        yield f"  {prefix}{rest} failed in other ways"


def _who(alike: Alike) -> str:
    if len(alike) == 1:
        return alike[0].where()
    hosts = sorted({report.host for report in alike if report.host})
    where = f" (host {hosts[0]})" if len(hosts) == 1 else f" ({len(hosts)} hosts)" if hosts else ""
    return rank_list(report.rank for report in alike) + where


def _did_all(alike: Alike) -> str:
    did = _did(alike[0])
    return f"were {did[4:]}" if len(alike) > 1 and did.startswith("was ") else did


def _did(report: RankReport) -> str:
    said = report.message.strip().partition("\n")[0]
    if report.kind == "raised":
        name = report.type_name or "an exception"
        return f"raised {name}: {said}" if said else f"raised {name}"
    if report.kind == "died":
        how = ", ".join(part for part in (report.exit, said) if part)
        return f"died: {how}" if how else "died"
    if report.kind == "timeout":
        return _was(report)
    done = "was cancelled" if report.kind == "cancelled" else "was stopped"
    return f"{done}: {said}" if said else done


def _was(report: RankReport) -> str:
    since = f" for {report.since:.1f} s" if report.since is not None else ""
    state = "could not be reached" if report.state == "unreachable" else f"was {report.state or 'running'}"
    return state + since


def _places(causes: Sequence[Alike]) -> Iterator[str]:
    """Yield a block with the place of each rank, for kinds of failures with several ranks."""
    several = [report for alike in causes if len(alike) > 1 for report in alike]
    if not any(report.host or report.pid is not None or report.accelerator for report in several):
        return
    lines = [f"  {report.where()}" for report in several[:_MAX_PLACES]]
    if len(several) > _MAX_PLACES:
        lines.append(f"  ... and {len(several) - _MAX_PLACES} more: see .failures")
    yield "\n".join(lines)


def _details(causes: Sequence[Alike]) -> Iterator[str]:
    for alike in causes[:_MAX_KINDS]:
        first = alike[0]
        if first.hint:
            yield f"hint: {first.hint}"
        if first.traceback:
            yield _block(f"remote traceback of rank {first.rank}:", _cut(first.traceback.splitlines()))
        elif "\n" in first.message.strip():
            yield _block(f"full message of rank {first.rank}:", _cut(first.message.splitlines()))
        for report in alike[:_MAX_STACKS]:
            if report.stack:
                yield _block(f"stack of rank {report.rank}:", _cut(report.stack.splitlines()))
        if first.log_tail:
            path = f" ({first.log_path})" if first.log_path else ""
            lines = first.log_tail[-_LOG_LINES:]
            yield _block(f"last lines logged by rank {first.rank}{path}:", lines)
        elif first.log_path:
            yield f"log of rank {first.rank}: {first.log_path}"


def _victims(victims: Sequence[Alike], causes: Sequence[Alike]) -> Iterator[str]:
    if not victims:
        return
    title = "waiting for that:" if causes[0][0].kind == "timeout" else "failed because of that:"
    yield "\n".join([title, *_kinds(victims, _MAX_KINDS)])


def _block(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _cut(lines: Sequence[str]) -> list[str]:
    """Return many lines without their middle; the end of a traceback is most useful."""
    if len(lines) <= _TRACEBACK_LINES:
        return list(lines)
    head, tail = _TRACEBACK_LINES // 4, _TRACEBACK_LINES - _TRACEBACK_LINES // 4
    left_out = len(lines) - head - tail
    return [*lines[:head], f"... {left_out} lines left out: see .failures ...", *lines[-tail:]]
