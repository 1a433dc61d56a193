"""Measure, print, and write the results: `python bench/run.py [--quick] [--only NAME] [--json PATH]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
