"""Every sentence with which verl refuses something, as its sources have them, and who of the two says it."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from plain import PREFIX
from sentence import Sentence
from sentences_controller import SENTENCES as OF_THE_CONTROLLER
from sentences_helpers import SENTENCES as OF_HELPERS
from sentences_protocol import SENTENCES as OF_PROTOCOL

LISTED: list[Sentence] = [*OF_PROTOCOL, *OF_HELPERS, *OF_THE_CONTROLLER]
FILES = (
    "protocol.py",
    "single_controller/**/*.py",
    "utils/tensordict_utils.py",
    "utils/py_functional.py",
    "utils/seqlen_balancing.py",
    "utils/ray_utils.py",
)

#: Sentences of verl that have no entry, as ``where: sentence`` patterns, and why.
VERSION = "the drop-in works with older versions of tensordict, too"
NEVER = "verl itself never comes there"
RAY = "needs a cluster: in cases_ray_groups"
ABSENT = "the drop-in has no such function"
NOT_LISTED = {
    "*requires tensordict version*": VERSION,
    "protocol:DataProto.check_consistency: only support num_batch_dims=1 when non_tensor_batch*": NEVER,
    "protocol:DataProto.check_consistency: data in the non_tensor_batch must be*": NEVER,
    "protocol:DataProtoFuture.get: Unknown type*": NEVER,
    "*:register_dispatch_mode: dispatch_mode_name * already exists": NEVER,
    "*._bind_worker_method: * in * is not callable": NEVER,
    "*:_bind_workers_method_to_parent: * in * is not callable": NEVER,
    "*:_bind_workers_method_to_parent: conflict direct rollout method*": "said with the sentence around it",
    "*:WorkerHelper._get_node_ip: WG_BACKEND now just support ray mode.": "the drop-in does not look at WG_BACKEND",
    "*:Worker._setup_env_cuda_visible_devices: *": "the drop-in leaves the masks of AMD's devices as they are",
    "*:ResourcePoolManager._check_resource_available: *": RAY,
    "*:RayWorkerGroup._get_master_addr_port: Both 'master_addr' and*": "verl forgets both; the drop-in takes either",
    "*:RayWorkerGroup._init_with_*: when generating for *": "the sentence ends in its middle",
    "*:RayWorkerGroup._create_worker: *": RAY,
    "*:concat_nested_tensors: nested tensor must have 2 or more*": "torch makes none with less",
    "*:timeout_limit.*": ABSENT,
    "*:get_group_balanced_partitions: *": ABSENT,
    "utils.seqlen_balancing:karmarkar_karp*: * not in*": NEVER,
    "utils.seqlen_balancing:*: * * * != *": "the drop-in has one way to deal out rows, and names its parts",
    "utils.seqlen_balancing:get_seqlen_balanced_partitions._check*": NEVER,
}


def case_words() -> dict[str, str]:
    """Of each sentence that is listed: whether it is said."""
    return {f"{index} {one.where}": one.said() == one.text or one.said() for index, one in enumerate(LISTED)}


def case_sources() -> dict[str, list[str]]:
    """What verl's sources say that is not listed, and what is listed that they do not say: nothing."""
    if PREFIX != "verl":
        return {"not listed": [], "not said": [], "idle": []}
    found = list(_sentences(Path(importlib.util.find_spec("verl").origin).parent))
    said = [where for where, _ in found]
    texts = [f"{where}: {template.replace(chr(0), '*')}" for where, template in found]
    return {
        "not listed": [text for text, one in zip(texts, found, strict=True) if not _is_listed(text, *one)],
        "not said": [one.where for one in LISTED if one.where not in said],
        "idle": [pattern for pattern in NOT_LISTED if not fnmatch.filter(texts, pattern)],
    }


def _is_listed(text: str, where: str, template: str) -> bool:
    words = re.compile(".*".join(map(re.escape, template.split(chr(0)))), re.DOTALL)
    entry = any(one.where == where and words.fullmatch(one.text) for one in LISTED)
    return entry or any(fnmatch.fnmatchcase(text, pattern) for pattern in NOT_LISTED)


def _sentences(package: Path) -> Iterator[tuple[str, str]]:
    """Function and sentence of every ``raise`` and ``assert`` that has one; NUL stands for what is filled in."""
    for path in (path for pattern in FILES for path in sorted(package.glob(pattern))):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        yield from _in(ast.parse(path.read_text()), module, ())


def _in(node: ast.AST, module: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = names
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*names, child.name)
        template = _template(_said_by(child))
        if template is not None:
            yield f"{module}:{'.'.join(names)}", template
        yield from _in(child, module, inner)


def _said_by(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Assert):
        return node.msg
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        return node.exc.args[0]
    return None


def _template(node: ast.AST | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else chr(0) for v in node.values)
    return None
