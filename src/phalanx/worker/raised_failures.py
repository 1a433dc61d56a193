"""What a call raises that failed on a rank: its error, with where it was."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

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
    """Return ``error`` as the failure of a method in this process, which ``setup`` made a rank.

    If an argument is the result of a call that failed, the failure keeps the type of that call's error, so that
    ``except KeyError`` on the driver catches it here too.
    """
    upstream = error.report if isinstance(error, RankFailure) else None
    if upstream is not None:
        from phalanx.collect.failures import is_cut_off  # loaded only if a call failed

        cls = ArgumentLost if upstream.lost or is_cut_off(upstream) else DispatchError
        error = cls(f"an argument of this call is the result of a call that failed: {error}")
    failure = capture(
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
    if upstream is None or upstream.exception_bytes is None:
        return failure
    return RankFailure(replace(failure.report, exception_bytes=upstream.exception_bytes))


def _accelerator(setup: RankConfig | None) -> str | None:
    if setup is None or not setup.accelerator_ids:
        return None
    return f"GPU {','.join(setup.accelerator_ids)}"
