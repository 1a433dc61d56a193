"""What verl imports of Phalanx at the end of its own import, by its hooks for plugins.

It acts only with ``PHALANX_VERL=1``: an installed Phalanx takes nothing over by itself. verl passes over the exceptions
of a plugin without a word, and its own controller would run; so this one ends the process where it cannot take effect.
"""

from __future__ import annotations

import logging
import sys

from phalanx.config import overlays_verl

if overlays_verl():
    try:
        from phalanx.compat.verl import overlay
        from phalanx.compat.verl.collector import spare_imports

        overlay.install()
        if "phalanx.compat.verl.remote" not in sys.modules:  # a rank sees to its imports itself
            spare_imports()
    except Exception as error:
        sentence = f"phalanx: {type(error).__name__}: {error}"
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():  # Ray does not show why a task ends its process
            logging.getLogger("phalanx").error(sentence)
        raise SystemExit(sentence) from error
