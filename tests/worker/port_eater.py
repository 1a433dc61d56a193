"""Takes ports until its input ends: any that the kernel gives, and the neighbours of those that others listen on."""

from __future__ import annotations

import resource
import select
import socket
import sys
from collections import deque
from pathlib import Path

AT_A_TIME, KEPT, EVERY_S = 40, 4000, 0.05


def listening_ports() -> set[int]:
    """Ports in state LISTEN (0A) of every process of this machine."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"}


def take(port: int) -> socket.socket | None:
    taken = socket.socket()
    try:
        taken.bind(("", port))
        taken.listen()
    except OSError:
        taken.close()
        return None
    return taken


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = 2 * KEPT if hard == resource.RLIM_INFINITY else min(hard, 2 * KEPT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    held: deque[socket.socket] = deque()
    own: set[int] = set()
    eaten = 0
    print("eating", flush=True)
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        others = listening_ports() - own
        near = [port + 1 for port in sorted(others) if 1024 < port < 65535]
        for port in [0] * AT_A_TIME + near:
            taken = take(port)
            if taken is not None:
                eaten += 1
                held.append(taken)
                own.add(taken.getsockname()[1])
        while len(held) > min(KEPT, limit - 100):
            given_back = held.popleft()
            own.discard(given_back.getsockname()[1])
            given_back.close()
    print(eaten, flush=True)


if __name__ == "__main__":
    main()
