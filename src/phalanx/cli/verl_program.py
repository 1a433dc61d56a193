"""``python -m phalanx.cli.verl_program COMMAND...``: runs a program with Phalanx as verl's single controller.

``phalanx verl`` is replaced by this process, which only installs the overlay before the program. So exit codes,
interrupts and errors of the program are as without Phalanx.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import shutil
import sys
from collections.abc import Sequence

from phalanx.errors import DeclarationError, PhalanxError

_FAILED = 2  # exit code, as of the other commands
_ADVICE = "`phalanx verl -m verl.trainer.main_ppo ...`, `phalanx verl train.py` or `phalanx verl python3 ...`"


def main(words: Sequence[str]) -> None:
    """Run ``-m MODULE ...``, a file with its arguments, or any other program."""
    try:
        _check(words)
        from phalanx.compat.verl import install  # with PHALANX_VERL=1 the import itself may fail

        install(overlay=True)
        if words[0] != "-m" and not words[0].endswith(".py"):
            _become(words)  # its Python processes inherit variables that make verl import the plugin
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    # The last collection of an interpreter with a trainer takes seconds, for memory that is freed with the process.
    atexit.register(gc.freeze)
    if words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(words[0])), list(words)
        runpy.run_path(words[0], run_name="__main__")


def _become(words: Sequence[str]) -> None:
    try:
        os.execvp(words[0], list(words))
    except OSError as error:  # not executable, or without an interpreter line
        raise DeclarationError(
            f"{words[0]} cannot be run ({error.strerror}): is it a script of a shell? Then `phalanx verl bash "
            f"{words[0]} ...`"
        ) from None


def _check(words: Sequence[str]) -> None:
    if not words or list(words) == ["-m"]:
        raise DeclarationError(f"nothing to run: give a program and its arguments, as in {_ADVICE}")
    if words[0] == "-m":
        return
    if os.path.basename(words[0]) == "ray" and list(words[1:3]) == ["job", "submit"]:
        raise DeclarationError(
            "a job starts on its cluster, in an environment of its own, and would have verl's own controller: put "
            "`phalanx verl` before the command of the job, as in `ray job submit -- phalanx verl -m "
            "verl.trainer.main_ppo ...`"
        )
    if not os.path.isfile(words[0]) and (words[0].endswith(".py") or shutil.which(words[0]) is None):
        raise DeclarationError(
            f"there is no program {words[0]!r}: give one with its arguments, as in {_ADVICE}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
