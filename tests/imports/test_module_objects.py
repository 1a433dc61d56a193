"""The state of a driver is in its session: no other module keeps an object that changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.imports.source import MODULES
from tests.imports.test_layers import DRIVER

PACKAGES = (*DRIVER, "phalanx.weights", "phalanx.channels", "phalanx.checkpoint")
#: Expressions that make objects which may change, and calls among them whose results do not.
CHANGING = ast.Call | ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp
CONSTANTS = ("TypeVar", "Struct", "compile", "frozenset", "getLogger")
#: Objects that change, and why they are not in the session.
KNOWN = {
    "session.session.session": "the session",
    "session.background.background_thread": "a thread that the session's parts share",
    "session.background.monitor_thread": "a thread that the session's parts share",
    "group.preemption_notices.looks": "a turn of the background thread, without fields of its own",
    "calls.health_check.checks": "a turn of the monitor thread, without fields of its own",
    "calls.call_state.listening": "read by every call",
    "pools.slot_reservation.books": "a lock",
    "weights.process_group._environment_lock": "a lock",
    "weights.transports._offers": "tensors for a target rank in the same process",
    "channels.hub_client.hubs": "the hubs that this process uses, also where it is a rank without a session",
    "channels.hub_client.stored_items": "large items, kept until their hub reclaims them",
    "channels.hub_client._users": "threads that use channels, one of which may end an inline wait",
    "channels.hub_client._serial": "numbers",
    "channels.hub_client._keys": "numbers",
    "channels.payloads._numbers": "numbers",
    "channels.live_channels.live_channels": "open channels, also those of a rank",
    "channels.batch._endings": "batches that are acknowledged when a call ends",
    "checkpoint.steps._locks": "paths that this process holds, for all its managers",
    "checkpoint.steps._guard": "a lock",
    "checkpoint.save_future._open": "saves in the background, which the end of the program waits for",
    "checkpoint.save_load.save": "a function with a method, ``px.save.submit``, without fields",
    "debug.trace._traces": "the trace that is on",
    "debug.trace._saver": "a turn of the background thread, without fields of its own",
}


def objects(source: str) -> Iterator[str]:
    """Names that a module assigns at its level to an object that can change."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, CHANGING):
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        constant = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(CONSTANTS)
        if not constant and not name.strip("_").isupper():
            yield name


def test_driver_modules_have_only_the_known_mutable_objects() -> None:
    found = {
        f"{module.removeprefix('phalanx.')}.{name}"
        for module, path in MODULES.items()
        if module.startswith(tuple(f"{package}." for package in PACKAGES))
        for name in objects(path.read_text())
    }

    assert found == set(KNOWN)


def test_mutable_module_objects_are_found() -> None:
    source = "a = []\nb: dict[str, int] = {}\nc = Thing()\nD = {1: 2}\nlog = logging.getLogger('x')\n"

    assert list(objects(source)) == ["a", "b", "c"]
