"""What a call raises that failed on a rank: its error, with where it was."""

from __future__ import annotations

import os
import socket

from phalanx.errors import ArgumentLost, DispatchError, FailureKind
from phalanx.wire.failure import RankFailure, capture
from phalanx.wire.messages import RankConfig
from phalanx.worker.control import Interrupted


def failed(
    error: BaseException,
    setup: RankConfig | None,
    log_path: str | None,
    *,
    role: str,
    method: str,
    kind: FailureKind,
) -> RankFailure:
    """``error`` as what a method raised in this process, which ``setup`` made a rank that logs to ``log_path``."""
    if isinstance(error, RankFailure):  # an upstream future failed: its own report names the source
        from phalanx.collect.failures import is_cut_off  # where a call failed

        cls = ArgumentLost if error.report.lost or is_cut_off(error.report) else DispatchError
        error = cls(f"an argument of this call is the result of a call that failed: {error}")
    return capture(
        error,
        kind="cancelled" if isinstance(error, Interrupted) else kind,
        rank=setup.rank if setup else -1,
        role=role or None,
        method=method,
        host=setup.host if setup else socket.gethostname(),
        pid=os.getpid(),
        accelerator=_accelerator(setup),
        node_id=setup.node_id if setup else None,
        log_path=log_path,
    )


def _accelerator(setup: RankConfig | None) -> str | None:
    if setup is None or not setup.accelerator_ids:
        return None
    return f"GPU {','.join(setup.accelerator_ids)}"
