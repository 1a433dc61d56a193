"""Check CUDA IPC, NCCL and device tensors through a call on this machine: ``python -m bench.gpu_check``.

It starts a local Ray cluster. Without a device it says so. The exit status is 0 unless a check failed.
"""

from __future__ import annotations

import sys

from phalanx.cli.gpu_check import check_devices, report


def main() -> int:
    """Print the table of checks and return the exit status."""
    results = check_devices()
    print(report(results))
    return int(any(result.result != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
