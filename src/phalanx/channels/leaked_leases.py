"""What was taken by batches that nobody holds any more goes back, soon and without anybody asking."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import NamedTuple

from phalanx.channels.services import Port

_log = logging.getLogger("phalanx")


class Dropped(NamedTuple):
    """A lease that nobody will end."""

    port: Port
    key: str
    name: str
    lease: int


class DroppedLeases:
    """Those of this process. A thread gives them back: nothing may be sent in the middle of a collection."""

    def __init__(self) -> None:
        self._leases: deque[Dropped] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pid = 0

    def watch(self) -> None:
        """Have a thread for what will be added."""
        if self._pid == os.getpid():  # a fork has none
            return
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._run, name="phalanx-dropped", daemon=True).start()

    def add(self, dropped: Dropped) -> None:
        """Note one; takes no lock."""
        self._leases.append(dropped)
        self._wake.put(None)

    def give_back(self) -> None:
        """Give back all that were added before this."""
        with self._lock:  # whoever waits for it finds all of them said
            while self._leases:
                port, key, name, lease = self._leases.popleft()
                _log.warning(
                    "channel %r: a batch was dropped that was neither acknowledged nor given back; its items go back "
                    "to the front. Take in a `with` block, or say batch.ack() or batch.ack_with(future)",
                    name,
                )
                port.say(key, "back", lease, frozenset())

    def _run(self) -> None:
        while True:
            self._wake.get()
            self.give_back()


dropped = DroppedLeases()
"""Those of this process."""
