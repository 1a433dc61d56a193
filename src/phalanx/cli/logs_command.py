"""`phalanx logs GROUP`: output of the ranks, each line with its rank."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import typer

from phalanx.cli.common import Address, AsJson, GroupName, Ranks, observed_ranks
from phalanx.display.log_merging import Lines, prefix_of
from phalanx.errors import DispatchError

_CHUNK = 1 << 20
_POLL_S = 0.2

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new output.")]
Tail = Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines of each rank.")]


def logs(
    group: GroupName,
    rank: Ranks = None,
    follow: Follow = False,
    tail: Tail = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of the ranks of a group: of Python, of native libraries and of child processes.

    Each line has its rank's prefix, such as \\[actor r3@host]. Equal lines of many ranks are not merged.

    Examples:

      phalanx logs trainer --rank 0 --tail 50

      phalanx logs trainer --follow

    Exit codes: 0 done; 2 no cluster, no such group or rank, or a file cannot be read.
    """
    with observed_ranks(address, group, rank) as (observer, found, ranks):
        try:
            files = [new_lines(partial(observer.read, entry), follow=follow) for entry in ranks]
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    for entry, texts in zip(ranks, [next(file) for file in files], strict=True):
                        for text in deque(texts, maxlen=tail):
                            line = prefix_of(found.label, [entry.rank], [entry.host]) + text
                            typer.echo(json.dumps({"rank": entry.rank, "text": text}) if as_json else line)
                    if not follow:
                        break
                    time.sleep(_POLL_S)
                    tail = None  # only existing output is cut
        except BrokenPipeError:
            raise  # the reader of the output ended
        except OSError as error:
            raise DispatchError(f"group {found.name!r}: {error}") from None


def new_lines(read: Callable[[int, int], bytes], *, follow: bool) -> Iterator[list[str]]:
    """Yield the new lines of a log file at each read; without ``follow``, also a last line without a newline.

    Raises:
        OSError: if the file cannot be read.
    """
    lines, offset = Lines(), 0
    while True:
        texts: list[str] = []
        data = None
        while data is None or len(data) == _CHUNK:
            data = read(offset, _CHUNK)
            offset += len(data)
            texts += lines.feed(data)
        yield texts if follow else [*texts, *lines.finish()]
