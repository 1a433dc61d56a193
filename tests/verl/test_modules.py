"""Every module of verl that can be imported alone can be imported under the overlay."""

from __future__ import annotations

import json
from typing import Any

from bench.trainers.programs import SITE
from tests.verl.conftest import Interpreter

SCRIPT = str(SITE / "importable.py")


def found(interpreter: Interpreter, *words: str) -> dict[str, Any]:
    ran = interpreter.run(*words, SCRIPT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def test_every_importable_module_of_verl_can_be_imported_under_the_overlay(interpreter: Interpreter) -> None:
    alone = found(interpreter)
    under = found(interpreter, "-m", "phalanx", "verl")

    lost = set(alone["could"]) - set(under["could"])
    assert {name: under["could_not"].get(name, "not there") for name in lost} == {}
    assert len(alone["could"]) > 250
