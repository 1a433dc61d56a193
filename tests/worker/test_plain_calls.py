"""Calls past the library: what a trace has of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from phalanx.tracing.events import TrackKey
from phalanx.tracing.span_writer import path_of, read
from phalanx.wire.codec import encode
from phalanx.worker.direct_actor_calls import PlainCalls
from phalanx.worker.span_writers import Journals


def test_a_traced_call_has_the_bytes_of_its_arguments_and_of_what_is_sent_back(tmp_path: Path) -> None:
    journals = Journals(own_process=False)
    journals.files = str(tmp_path / "rank")
    worker = SimpleNamespace(double=lambda value: np.zeros(1 << 20, np.uint8))
    unused: Any = None
    calls = PlainCalls({"": worker}, journals, unused, SimpleNamespace(control=None))  # type: ignore[arg-type]

    sent = calls.run("", "double", (1,), {}, ("trace", 7, 512), encode)

    lines = Path(path_of(journals.files, "trace")).read_bytes().splitlines()
    part = read(lines, TrackKey("group", 0, 0)).parts[7]
    assert part.argument_bytes == 512
    assert part.result_bytes == sent.nbytes >= 1 << 20
