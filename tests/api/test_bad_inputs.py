"""A table of refused public inputs by the type of their error. It shrinks only if a feature is removed."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.testing import faults


class Worker(px.Worker):
    def __init__(self, start: float = 0.0) -> None:
        self.start = start

    @px.register
    def add(self, x: int) -> int:
        return x

    @px.register(px.Dispatch.ALL_TO_ALL)
    def dealt(self, x: int) -> int:
        return x

    @px.register(px.Dispatch.ROWS)
    def rows(self, x: Any, y: Any = None) -> Any:
        return x

    @px.register(px.Dispatch.mesh("model"))
    def meshed(self, x: Any) -> Any:
        return x

    @px.register
    def items(self, n: int) -> Iterator[int]:
        yield from range(n)


class Needy(px.Worker):
    def __init__(self, rate: float) -> None: ...


REFUSED = {
    px.DeclarationError: """
        px.ResourcePool([])  # list of positive whole numbers
        px.ResourcePool([0])  # list of positive whole numbers
        px.ResourcePool([-1])  # list of positive whole numbers
        px.ResourcePool([2.0])  # list of positive whole numbers
        px.ResourcePool([torch.tensor(2.5)])  # list of positive whole numbers
        px.ResourcePool([True])  # list of positive whole numbers
        px.ResourcePool("4")  # list of positive whole numbers
        px.ResourcePool(4)  # list of positive whole numbers, one per block: [4]
        px.ResourcePool({"a": 1})  # list of positive whole numbers
        px.ResourcePool([2], use_gpu="maybe")  # use_gpu='maybe'
        px.ResourcePool([2], use_gpu=0)  # use_gpu=0
        px.ResourcePool([2], max_colocate_count=0)  # max_colocate_count=0
        px.ResourcePool([2], accelerators_per_slot=0)
        px.ResourcePool([2], accelerators_per_slot=1.5)  # accelerators_per_slot=1.5
        px.ResourcePool([2], timeout=-1)  # timeout=-1
        px.ResourcePool([2], timeout=float("nan"))  # timeout=nan
        px.ResourcePool([2], backend="dask")  # 'dask'
        pool[9]  # expected -4 to 3
        pool[-5]  # expected -4 to 3
        pool["a"]  # pool['a']: expected a slot's number
        pool[True]  # pool[True]: expected a slot's number
        pool[3:3]
        pool[0:3] + pool[2:4]  # is in the view twice
        pool.split(3)  # world size 4; give one of [1, 2, 4]
        pool.split(0)  # world size 4
        pool.split(True)  # world size 4
        pool.split("22")  # world size 4
        pool.split([2, 1])  # world size is 4
        pool.split([0, 4])  # world size 4
        pool.split([4.0])  # world size 4
        pool.grow([0])
        pool[0:1].grow()  # a view of another pool's slots
        pool.shrink()  # it has only the slots that it was created with
        px.WorkerGroup(4, W)
        px.WorkerGroup(pool, 3)
        px.WorkerGroup(pool[0:1], W.bind(stop=1))
        W.bind(1, 2)  # Worker(int, int): too many positional arguments; expected Worker(start:
        px.WorkerGroup(pool[0:1], W, mesh=px.Mesh(dp=3))
        px.WorkerGroup(pool[0:1], W, mesh="dp")
        px.WorkerGroup(pool[0:1], W, name="")
        px.WorkerGroup(pool[0:1], W, num_cpus=-1)
        px.WorkerGroup(pool[0:1], W, start_timeout=0)
        px.WorkerGroup(pool[0:1], W, call_timeout=-1)
        px.WorkerGroup(pool[0:1], W, call_timeout=float("nan"))
        px.WorkerGroup(pool[0:1], W, max_concurrency=0)
        px.WorkerGroup(pool[0:1], W, max_concurrency=True)
        px.WorkerGroup(pool[0:1], W, visible_devices="all")  # expected 'own'
        px.WorkerGroup(pool[0:1], W, on_failure=3)
        px.WorkerGroup(pool[0:1], W, on_notice=3)
        px.WorkerGroup(pool[0:1], W, detached=True)
        px.WorkerGroup(pool[0:1], W, detached=True, name="x")
        px.WorkerGroup(pool[0:1], W, show_ranks="some")
        px.WorkerGroup(pool[0:1], W, env={"A": 1})  # write A='1'
        px.Mesh(dp=0)  # whole number from 1
        px.Mesh(dp=True)  # whole number from 1
        px.Mesh(dp=1.5)  # whole number from 1
        px.Mesh()  # name at least one
        px.Mesh(dp=-1, tp=-1)  # dp, tp are all -1
        px.Mesh(**{"d p": 2})  # identifier
        px.Mesh(dp=3).resolve(4)  # 3 ranks but the group has 4
        px.Mesh(dp=-1, tp=3).resolve(8)  # multiply to 3, which does not divide 8
        px.Mesh.from_coordinates([])  # one dict
        px.Mesh.from_coordinates([{"dp": 0}, {"dp": -1}])  # rank 1 reports dp=-1
        px.Mesh.from_coordinates([{"dp": 0}, {"dp": 1, "tp": 0}])  # rank 0 reports the axes ['dp'], rank 1 ['dp', 'tp']
        px.Mesh.from_coordinates([{"dp": 0}, {"dp": 1}, {"dp": 1}])  # ranks 1 and 2 both report dp=1
        px.Mesh.from_coordinates([{"dp": 0}, {"dp": 10**12}])  # 1000000000001 places for 2 ranks
        px.colocate({})
        px.colocate({"close": W})
        px.colocate({"a b": W})
        px.colocate({"_x": W})
        px.colocate([W])
        Needy.bind()  # missing a required argument: 'rate'
        px.colocate({"needy": Needy})  # missing a required argument: 'rate'
        px.WorkerGroup(pool[0:1], Needy)  # missing a required argument: 'rate'
        px.register(collect="sum")(lambda self: 1)
        px.register(px.Dispatch.RANK_ZERO, collect="list")  # only rank 0 runs the method
        px.register(px.Dispatch.RANK_ZERO, collect=len)  # only rank 0 runs the method
        px.register(execute_mode=px.Execute.RANK_ZERO, collect="join")  # only rank 0 runs the method
        px.register({"dispatch_fn": len, "collect_fn": len}, collect="list")  # CUSTOM, which has a collect function
        px.register("ROWS")  # unknown dispatch mode 'ROWS'
        px.register(execute_mode="ALL")
        px.register(pad_to_multiple=0)
        px.register(pad_to_multiple=2)
        px.register(px.Dispatch.ROWS, pad_to_multiple=True)
        px.register(property(len))  # len, which is a property: expected a plain method
        px.register(staticmethod(len))  # len, which is a staticmethod
        px.register()(classmethod(len))  # len, which is a classmethod
        px.register(functools.cached_property(len))  # len, which is a cached_property
        px.register(functools.lru_cache(len))  # len, which is a cache
        px.register(px.Dispatch.ROWS)(functools.lru_cache(len))  # len, which is a cache
        px.register(functools.partialmethod(len))  # len, which is a partialmethod
        px.register()(contextlib.contextmanager(lambda: (yield)))  # <lambda>, which is a contextmanager
        type("A", (px.Worker,), {"f": px.register(rerun_on_restart=True)(lambda _: (yield))})  # that returns
        type("A", (px.Worker,), {"f": px.register(blocking=False)(lambda _: (yield))})  # group.f.submit(...)
        type("A", (px.Worker,), {"f": px.register(lambda _, buffer: (yield buffer))})  # parameter 'buffer'
        type("A", (px.Worker,), {"f": px.register(lambda _, by: (yield by))})  # (by=...) takes itself: rename
        px.register({"dispatch_fn": len})  # collect_fn
        px.register({"dispatch_fn": len, "collect_fn": 3})  # collect_fn
        px.register({"x": 1})  # collect_fn
        px.Dispatch.mesh(group_size=0)
        px.Dispatch.mesh(group_size="2")
        px.Dispatch.mesh(None)
        px.data.register_dispatch_mode("1", len, len)
        px.data.register_dispatch_mode(5, len, len)
        px.data.register_dispatch_mode("ROWS", len, len)  # exists already
        px.data.register_dispatch_mode("NEVER", len, None)  # collect_fn=None
        group.method(3)
        group.profile(tool="perf")
        px.explain(3)
        px.RestartPolicy(max_restarts=-1)  # px.Restart
        px.RestartPolicy(max_restarts=True)  # px.Restart
        px.RestartPolicy(window_s=0.0)  # px.Restart
        px.RestartPolicy(window_s="9")  # px.Restart
        px.ReplacePolicy(max_failures=-1)  # px.Replace
        px.ReplacePolicy(window_s=0)  # px.Replace
        px.resize(group, 0)  # 1 or more
        px.resize(view, 2)
        px.resize(group, 1)  # px.load(group, folder). Or say `independent = True`
        px.replace_ranks(view)
        px.replace_ranks(group, 9)  # expected ranks 0-1
        px.replace_ranks(group, None)  # expected ranks 0-1
        px.replace_ranks(group, [-1])  # expected ranks 0-1
        px.replace_ranks(group, True)  # expected ranks 0-1
        px.replace_ranks(group, "one")  # expected ranks 0-1
        px.replace_ranks(group, [0.5])  # expected ranks 0-1
        px.replace_ranks(group, torch.tensor(9))  # expected ranks 0-1
        px.replace_ranks(group, 0, state="old")
        px.snapshot(view)  # expected a px.WorkerGroup
        px.snapshot(group, group)  # given twice
        px.channels.snapshot(3)  # expected a list of px.Channel
        px.checkpoint.CheckpointManager(folder, channels=[3])  # expected a list of px.Channel
        px.restore(view)  # expected a px.WorkerGroup
        px.restore(group, group)  # given twice
        px.save(3, folder)
        px.save(group, folder, keep=0)
        px.save(group, folder, keep="2")
        px.save(group, folder, step=-1)
        px.save(group, folder, step=1.0)
        px.save(group, folder, step="1")
        px.save(group, folder, step=True)
        px.save(group, folder, format="hugging face", keep=2)  # leave it out
        px.load(group, folder, format="hugging face", parts=["model"])  # leave them out
        px.checkpoint.CheckpointManager(folder, groups={"g": 3})
        px.WeightSync(3, group, "policy")
        px.WeightSync(group, 3, "policy")  # the target is 3; give a group
        px.WeightSync(group, [], "policy")  # at least one group
        px.WeightSync(group, closed, "policy", transport="rdma")
        px.WeightSync(group, closed, "policy", verify="some")
        px.WeightSync(group, closed, "policy", bucket_bytes=12)
        px.WeightSync(group, closed, "policy", bucket_bytes="256 MB")
        px.WeightSync(group, closed, "policy", timeout=-1.0)  # expected seconds, 0 or more
        px.weights.publish(W(), "", torch.nn.Linear(1, 1))
        px.weights.publish(W(), "policy", "model")
        px.weights.publish(W(), "policy", {}, step=3)
        px.weights.accept(W(), "policy")
        px.weights.accept(W(), "policy", {}, load=3)
        px.weights.accept(W(), "policy", {}, load=print, share=True)
        px.weights.current_version("policy")
        S(max_tokens=0)
        S(max_tokens=True)  # max_tokens=True
        S(stop=[""])  # empty text
        S(stop=1.5)  # stop=1.5
        S(temperature=-1)
        S(top_p=0)
        S(n=0)
        px.engines.sticky(group, "k", margin=-1)
        px.init(backend="dask")
        px.init(show_ranks="some")
        px.trace("trace")
        px.trace("run.pftrace")  # run.pftrace: the suffix of a trace
        px.trace("run.txt")  # expected .json (for Perfetto) or .html
        px.trace("/proc/x.json").start()  # expected a path in a folder
        px.trace("/dev/null/runs/x.json").start()  # expected a path in a folder
        faults.drop_node(type("Cluster", (), {"worker_nodes": ()}), group, 0)  # not a worker node
        px.Channel(-1)
        px.Channel(0)  # a whole number from 1
        px.Channel(2.5)  # a whole number from 1
        px.Channel("many")  # a whole number from 1
        px.Channel(True)  # a whole number from 1
        px.Channel(by="rows")
        px.StalenessManager(-1, 4)
    """,
    px.DispatchError: """
        px.data.register_row_type(3, count=len, slice=len, concat=len)  # register_row_type(3, ...): expected a class
        px.data.register_row_type(W, count=None, slice=len, concat=len)  # register_row_type(Worker, count=None)
        px.data.register_row_type(W, count=len, slice=len, concat=len, take=3)  # register_row_type(Worker, take=3)
        faults.kill(group, -1)  # expected ranks 0-1
        faults.kill(group, 2)  # expected ranks 0-1
        faults.slow(view, 1, 0.1, method="add")  # ranks 1; expected rank 0
        px.data.split_rows([1], 0)
        px.data.join_rows([])
        px.data.count_rows({"a": [1], "b": [1, 2]})
        group.add()
        group.add(1, 2)
        group.add(y=1)
        group.dealt(1)  # 'x' is an int; expected a list or tuple of world_size = 2
        group.dealt(torch.zeros(2))  # 'x' is a Tensor of shape (2,) and dtype torch.float32; expected a list
        group.dealt([1])  # 'x' is a list of 1 elements; expected a list
        group.rows(torch.ones(2), y={"a": torch.ones(3)})  # x has 2, y['a'] has 3. Everything
        group.rows({"a": torch.ones(2), "b": [1]})  # x['a'] has 2, x['b'] has 1
        group.rows([1], [1, 2])  # px.replicate
        group.meshed([1])
        group.add.options(timeout=0)  # timeout=
        group.add.options(timeout="1")  # timeout=
        group.add.options(timeout=-1.0)  # timeout=
        group.add.options(timeout=True)  # timeout=
        group.add.options(timeout=float("nan"))  # timeout=
        group.add.stream(1, by="rows")  # unexpected keyword argument 'by'
        group.items.stream(1, by="columns")  # by='columns'): expected "items" or "rows"
        group.items.stream(2, buffer=0)  # whole number from 1
        group.items.stream(2, buffer=-1)  # whole number from 1
        group.items.stream(2, buffer=True)  # whole number from 1
        group.items.stream(2, buffer=1.5)  # whole number from 1
        group.items.stream(2, buffer="8")  # whole number from 1
        group.run(3)
        group[5]
        group[2:2]  # slice(2, 2, None)] is empty
        group["a"]
        group.rank(9)  # expected a rank from -2 to 1
        group.rank(-3)  # expected a rank from -2 to 1
        group.rank(True)  # expected a rank from -2 to 1
        group.rank("0")  # expected a rank from -2 to 1
        group.profile(ranks=[9])  # expected ranks 0-1
        group.profile(calls=0)  # whole number from 1
        px.Mesh(dp=4).coordinates(4)  # rank 4 is not in Mesh(dp=4); expected 0 to 3
        px.Mesh(dp=2, tp=2, pp=1).rank(dp=0)  # no coordinate for tp
        px.Mesh(dp=2).dp_groups(("dp", "dp"))  # twice
        px.Mesh(dp=2).ranks(dp=2)  # axes and sizes are {'dp': 2}
        px.Mesh(dp=2).ranks(dp=-1)  # axes and sizes are {'dp': 2}
        px.Mesh(dp=2).ranks(dp=0.5)  # axes and sizes are {'dp': 2}
        px.Mesh(dp=2).ranks(dp=True)  # axes and sizes are {'dp': 2}
        px.Mesh(dp=2).ranks(typo=1)  # axes and sizes are {'dp': 2}
        px.Mesh(dp=-1, tp=2).world_size  # resolve(world_size)
        px.Mesh(dp=-1, tp=2).ranks()  # resolve(world_size)
        px.Mesh(dp=-1, tp=2).dp_groups()  # resolve(world_size)
        px.Mesh(dp=-1, tp=2).coordinates(0)  # resolve(world_size)
        future.result(timeout=-1)  # expected seconds, 0 or more
        future.result(timeout="1")  # expected seconds, 0 or more
        future.result(timeout=True)  # expected seconds, 0 or more
        future.exception(timeout=float("nan"))  # expected seconds, 0 or more
        future.stream(timeout=-1)  # expected seconds, 0 or more
        px.gather(future, timeout="3")  # expected seconds, 0 or more
        px.gather(3)
    """,
    AttributeError: """
        px.Dispatch.NONE
        group.nothing
        group.call("nothing")
        group.execute_all_sync("nothing")
    """,
    px.PlacementError: """
        px.ResourcePool([99], use_gpu=True)
        px.attach("nothing")
        px.resize(group, 5)  # pool.grow(3)
    """,
    px.checkpoint.CheckpointError: """
        px.restore(group)  # there is no snapshot of the group
        px.load(group, folder)
    """,
    px.GroupClosed: """
        closed.add(1)
    """,
    px.errors.ChannelError: """
        px.Channel.find("nothing")
    """,
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Names that the inputs of the table use."""
    pool = px.ResourcePool([4], use_gpu=False, backend="inline")
    group: Any = px.WorkerGroup(pool[0:2], Worker, name="group")
    closed = px.WorkerGroup(pool[2:3], Worker, name="closed")
    closed.close()
    folder = str(tmp_path_factory.mktemp("bad") / "nothing-there")
    yield {
        "px": px,
        "contextlib": contextlib,
        "functools": functools,
        "faults": faults,
        "torch": torch,
        "W": Worker,
        "Needy": Needy,
        "pool": pool,
        "group": group,
        "view": group[0:1],
        "closed": closed,
        "future": group.add.submit(1),
        "folder": folder,
        "S": px.engines.SamplingParams,
    }
    pool.close()


@pytest.mark.parametrize(
    ("call", "error"),
    [(line.strip(), error) for error, table in REFUSED.items() for line in table.strip().splitlines()],
)
def test_a_bad_input_is_refused_with_its_own_error(
    names: dict[str, Any], call: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "inline")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        eval(call, dict(names))  # the text after "#" is a part of the message
    assert type(raised.value) is error
    assert call.partition("  # ")[2] in str(raised.value)
    said = str(raised.value).lower().replace(" ", "_")
    assert said
    options = re.findall(r"(\w+)=", call)
    if options and error is px.DeclarationError:
        assert any(option in said for option in options)
