"""Phalanx: one driver script commands groups of SPMD workers, one per accelerator, on a Ray cluster.

Every public name is here, ``import phalanx as px``. Names are loaded when first used, so that the import
itself costs next to nothing and loads neither ray nor torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.collect.join import collect_all_to_all as collect_all_to_all
    from phalanx.collect.join import join_rows as join_rows
    from phalanx.declare.bind import ClassWithInitArgs as ClassWithInitArgs
    from phalanx.declare.bind import colocate as colocate
    from phalanx.declare.modes import Dispatch as Dispatch
    from phalanx.declare.modes import Execute as Execute
    from phalanx.declare.register import register as register
    from phalanx.declare.worker import Worker as Worker
    from phalanx.dispatch.modes import register_dispatch_mode as register_dispatch_mode
    from phalanx.dispatch.shardable import register_shardable as register_shardable
    from phalanx.dispatch.shardable import replicate as replicate
    from phalanx.dispatch.split import count_rows as count_rows
    from phalanx.dispatch.split import split_rows as split_rows
    from phalanx.errors import CallCancelled as CallCancelled
    from phalanx.errors import CallError as CallError
    from phalanx.errors import CallTimeout as CallTimeout
    from phalanx.errors import DeclarationError as DeclarationError
    from phalanx.errors import DispatchError as DispatchError
    from phalanx.errors import GroupBroken as GroupBroken
    from phalanx.errors import GroupClosed as GroupClosed
    from phalanx.errors import InternalError as InternalError
    from phalanx.errors import PhalanxError as PhalanxError
    from phalanx.errors import PlacementError as PlacementError
    from phalanx.errors import RankReport as RankReport
    from phalanx.errors import RanksDiverged as RanksDiverged
    from phalanx.errors import RemoteCallError as RemoteCallError
    from phalanx.errors import StaleEpoch as StaleEpoch
    from phalanx.errors import WorkerDiedError as WorkerDiedError
    from phalanx.errors import WorkerInitError as WorkerInitError
    from phalanx.observe.progress import progress as progress
    from phalanx.observe.spans import span as span
    from phalanx.runtime.attach import attach as attach
    from phalanx.runtime.cluster import init as init
    from phalanx.runtime.cluster import shutdown as shutdown
    from phalanx.runtime.cluster import status as status
    from phalanx.runtime.counts import statistics as statistics
    from phalanx.runtime.explain import explain as explain
    from phalanx.runtime.future import CallFuture as CallFuture
    from phalanx.runtime.future import gather as gather
    from phalanx.runtime.group import WorkerGroup as WorkerGroup
    from phalanx.runtime.policy import Restart as Restart
    from phalanx.runtime.pool import ResourcePool as ResourcePool
    from phalanx.runtime.pool import merge_resource_pool as merge_resource_pool
    from phalanx.runtime.pool import split_resource_pool as split_resource_pool
    from phalanx.runtime.profile import nsight as nsight
    from phalanx.runtime.replaying import replay as replay
    from phalanx.runtime.tracing import trace as trace
    from phalanx.runtime.values import put as put
    from phalanx.runtime.values import readonly as readonly
    from phalanx.topology.mesh import Mesh as Mesh

_HOME = {
    "CallCancelled": "phalanx.errors",
    "CallError": "phalanx.errors",
    "CallFuture": "phalanx.runtime.future",
    "CallTimeout": "phalanx.errors",
    "ClassWithInitArgs": "phalanx.declare.bind",
    "DeclarationError": "phalanx.errors",
    "Dispatch": "phalanx.declare.modes",
    "DispatchError": "phalanx.errors",
    "Execute": "phalanx.declare.modes",
    "GroupBroken": "phalanx.errors",
    "GroupClosed": "phalanx.errors",
    "InternalError": "phalanx.errors",
    "Mesh": "phalanx.topology.mesh",
    "PhalanxError": "phalanx.errors",
    "PlacementError": "phalanx.errors",
    "RankReport": "phalanx.errors",
    "RanksDiverged": "phalanx.errors",
    "RemoteCallError": "phalanx.errors",
    "Restart": "phalanx.runtime.policy",
    "ResourcePool": "phalanx.runtime.pool",
    "StaleEpoch": "phalanx.errors",
    "Worker": "phalanx.declare.worker",
    "WorkerDiedError": "phalanx.errors",
    "WorkerGroup": "phalanx.runtime.group",
    "WorkerInitError": "phalanx.errors",
    "attach": "phalanx.runtime.attach",
    "collect_all_to_all": "phalanx.collect.join",
    "colocate": "phalanx.declare.bind",
    "count_rows": "phalanx.dispatch.split",
    "explain": "phalanx.runtime.explain",
    "gather": "phalanx.runtime.future",
    "init": "phalanx.runtime.cluster",
    "join_rows": "phalanx.collect.join",
    "merge_resource_pool": "phalanx.runtime.pool",
    "nsight": "phalanx.runtime.profile",
    "progress": "phalanx.observe.progress",
    "put": "phalanx.runtime.values",
    "readonly": "phalanx.runtime.values",
    "register": "phalanx.declare.register",
    "register_dispatch_mode": "phalanx.dispatch.modes",
    "register_shardable": "phalanx.dispatch.shardable",
    "replay": "phalanx.runtime.replaying",
    "replicate": "phalanx.dispatch.shardable",
    "shutdown": "phalanx.runtime.cluster",
    "span": "phalanx.observe.spans",
    "split_resource_pool": "phalanx.runtime.pool",
    "split_rows": "phalanx.dispatch.split",
    "statistics": "phalanx.runtime.counts",
    "status": "phalanx.runtime.cluster",
    "trace": "phalanx.runtime.tracing",
}

__version__ = "0.1.0"
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
