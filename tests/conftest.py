"""One Ray cluster per test session, and a fixture that runs tests on every backend."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Generator, Iterator
from typing import Any

import cloudpickle
import pytest
from hypothesis import settings

import phalanx as px

# CI runs the same examples each time, so that it fails only because of a change.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local cluster of tests needs no token file
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
# A process that a shell starts with "&" ignores SIGINT, and so do its child processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on Ray as slow or soak, by their own mark or their module's ``SLOW_ON_RAY``, ``SOAK_ON_RAY``."""
    for module in {getattr(item, "module", None) for item in items}:
        if getattr(module, "BY_VALUE", False):  # spares its workers its imports: torch takes a second
            cloudpickle.register_pickle_by_value(module)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("backend") == "ray":
            for mark in _on_ray(item):
                item.add_marker(mark)


def _on_ray(item: pytest.Item) -> list[str]:
    """Return the marks of a test whose backend is Ray."""
    for mark in ("soak", "slow"):
        if item.get_closest_marker(f"{mark}_on_cluster") is not None:
            return [mark]
    module = getattr(item, "module", None)
    return [mark for mark in ("soak", "slow") if getattr(module, f"{mark.upper()}_ON_RAY", False)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print each failure at once: a run that is killed has no summary."""
    report = yield
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and reporter is not None:
        why = str(getattr(report.longrepr, "reprcrash", "") or report.longrepr).strip().splitlines()
        reporter.write_line(f"FAILED in its {report.when}: {report.nodeid}: {why[0] if why else ''}"[:500])
        reporter.flush()
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported objects from garbage collection, which tests run often."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests after CI's time for them is over."""
    after = os.environ.get("PHALANX_SKIP_SLOW_AFTER")
    is_slow = any(item.get_closest_marker(mark) is not None for mark in ("slow", "verl", "vllm"))
    if after is not None and time.time() > float(after) and is_slow:
        pytest.skip(f"no time left in this run of CI for {item.nodeid}")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster with 8 logical accelerators, for the whole session."""
    with pytest.MonkeyPatch.context() as patch:
        # Not px.init(backend="ray"): fixtures of modules set the default backend.
        patch.setenv("PHALANX_BACKEND", "ray")
        px.init(num_cpus=32, num_gpus=8)
    yield
    px.shutdown()


@pytest.fixture(scope="module", params=["inline", "ray"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn, as the default for the pools of a module's tests."""
    name = request.param
    if name == "ray":
        request.getfixturevalue("ray_cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_BACKEND", name)
        if name == "inline":
            px.init(num_gpus=8)
        yield name


@pytest.fixture(scope="module")
def pool(backend: str) -> Iterator[px.ResourcePool]:
    """Four slots without accelerators, on each backend, shared by the tests of a module."""
    with px.ResourcePool([4], use_gpu=False) as made:
        yield made


def _slots(count: int) -> Any:
    """Return a fixture of slots without accelerators on each backend, for a single test."""

    @pytest.fixture
    def slots(backend: str) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([count], use_gpu=False) as made:
            yield made

    return slots


two, three, four, eight = map(_slots, (2, 3, 4, 8))


@pytest.fixture
def here() -> Iterator[px.ResourcePool]:
    """Three inline slots, for tests that would show no more on Ray."""
    with px.ResourcePool([3], use_gpu=False, backend="inline") as made:
        yield made


@pytest.fixture
def group(shared: px.WorkerGroup) -> px.WorkerGroup:
    """The group that the tests of a module share, ready again."""
    if shared.state != "ready" or shared.core.backend.dead_of(shared.core.endpoints):
        shared.restart()
    return shared
