"""Calls of handles that are used without a group: what a trace has of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from phalanx.errors import DispatchError
from phalanx.tracing.events import TrackKey
from phalanx.tracing.span_writer import path_of, read
from phalanx.wire.codec import encode
from phalanx.worker.worker_runtime import WorkerRuntime
from tests.worker.test_host import Services


def test_a_traced_call_has_the_bytes_of_its_arguments_and_of_what_is_sent_back(tmp_path: Path) -> None:
    host = WorkerRuntime(Services())
    host.journals.files = str(tmp_path / "rank")
    host.instances[""] = SimpleNamespace(double=lambda value: np.zeros(1 << 20, np.uint8))

    sent = host.run_direct("", "double", (1,), {}, ("trace", 7, 512), encode)

    lines = Path(path_of(host.journals.files, "trace")).read_bytes().splitlines()
    part = read(lines, TrackKey("group", 0, 0)).parts[7]
    assert part.argument_bytes == 512
    assert part.result_bytes == sent.nbytes >= 1 << 20


def test_a_call_before_the_worker_is_made_says_so() -> None:
    with pytest.raises(DispatchError, match="in which the worker was not made"):
        WorkerRuntime(Services()).run_direct("", "double", (), {}, ("", 3, 0), encode)
