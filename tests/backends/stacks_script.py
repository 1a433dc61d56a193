"""A process whose stacks can be read like a rank's. It prints its side channel and runs a named function."""

import importlib
import json
import signal
import sys
import threading
import time

from phalanx.worker.control import Control

channel = Control()
MODULES = ("email.message", "json.decoder", "html.parser", "xml.dom.minidom", "unittest.mock", "http.client")


def imports_and_starts_threads() -> None:
    while True:
        for name in MODULES:
            sys.modules.pop(name, None)
            importlib.import_module(name)
        threads = [threading.Thread(target=deep, args=(20,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def deep(more: int) -> object:
    return eval("deep(more - 1)", {"deep": deep, "more": more}) if more else [object() for _ in range(50)]


def sleeps() -> None:
    time.sleep(1000)


def holds_the_interpreter() -> None:
    print("spins", flush=True)
    sum(range(10**15))


def runs_calls() -> None:
    channel.page.runs_on(threading.get_native_id())
    holds_the_interpreter()


if "takes_the_signal" in sys.argv:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
print(json.dumps(channel.describe()), flush=True)
doing = globals()[sys.argv[1]]
if "on_a_thread" in sys.argv:
    threading.Thread(target=doing).start()
else:
    doing()
