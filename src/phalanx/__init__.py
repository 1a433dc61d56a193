"""Phalanx: one driver script controls groups of SPMD workers, one per accelerator, on a Ray cluster.

Use it as ``import phalanx as px``. Names are loaded on first use: the import itself takes a few milliseconds and loads
neither ray nor torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.api.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx import channels as channels
    from phalanx import checkpoint as checkpoint
    from phalanx import data as data
    from phalanx import debug as debug
    from phalanx import engines as engines
    from phalanx import errors as errors
    from phalanx import weights as weights
    from phalanx.api.attach import attach as attach
    from phalanx.api.explain import explain as explain
    from phalanx.api.members import preemption_notices as preemption_notices
    from phalanx.api.members import replace_ranks as replace_ranks
    from phalanx.api.members import resize as resize
    from phalanx.api.members import restore as restore
    from phalanx.api.members import snapshot as snapshot
    from phalanx.api.worker_group import WorkerGroup as WorkerGroup
    from phalanx.calls.future import CallFuture as CallFuture
    from phalanx.calls.future import gather as gather
    from phalanx.calls.values import put as put
    from phalanx.calls.values import readonly as readonly
    from phalanx.channels.channel import Channel as Channel
    from phalanx.channels.staleness import StalenessManager as StalenessManager
    from phalanx.checkpoint.save_load import load as load
    from phalanx.checkpoint.save_load import save as save
    from phalanx.debug.trace import trace as trace
    from phalanx.declare.bind import BoundClass as BoundClass
    from phalanx.declare.bind import colocate as colocate
    from phalanx.declare.dispatch_modes import Dispatch as Dispatch
    from phalanx.declare.dispatch_modes import Execute as Execute
    from phalanx.declare.register import register as register
    from phalanx.declare.state_declarations import register_state as register_state
    from phalanx.declare.worker import Worker as Worker
    from phalanx.dispatch.shardable import replicate as replicate
    from phalanx.errors import CallCancelled as CallCancelled
    from phalanx.errors import CallError as CallError
    from phalanx.errors import CallTimeout as CallTimeout
    from phalanx.errors import DeclarationError as DeclarationError
    from phalanx.errors import DispatchError as DispatchError
    from phalanx.errors import GroupBroken as GroupBroken
    from phalanx.errors import GroupClosed as GroupClosed
    from phalanx.errors import PhalanxError as PhalanxError
    from phalanx.errors import PlacementError as PlacementError
    from phalanx.errors import RemoteCallError as RemoteCallError
    from phalanx.errors import WorkerDiedError as WorkerDiedError
    from phalanx.errors import WorkerInitError as WorkerInitError
    from phalanx.group.options import ReplacePolicy as ReplacePolicy
    from phalanx.group.options import RestartPolicy as RestartPolicy
    from phalanx.group.preemption_notices import PreemptionNotice as PreemptionNotice
    from phalanx.pools.pool import ResourcePool as ResourcePool
    from phalanx.session.session import init as init
    from phalanx.session.session import shutdown as shutdown
    from phalanx.topology.mesh import Mesh as Mesh
    from phalanx.tracing.spans import span as span
    from phalanx.weights.weight_sync import WeightSync as WeightSync

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_names(__name__)
