"""The plugin that verl imports at the end of its own import, by verl's hooks for plugins.

Row types of verl are always registered. The overlay is installed only with ``PHALANX_VERL=1``: an installed Phalanx
does not replace the controller unasked. verl would ignore an exception of the plugin and run its own controller, so
this plugin ends the process if the overlay cannot take effect.
"""

from __future__ import annotations

import gc
import logging
import sys

from phalanx.config import overlays_verl

if overlays_verl():
    try:
        from phalanx.compat.verl import overlay

        overlay.install()
    except Exception as error:
        message = f"phalanx: {type(error).__name__}: {error}"
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():  # Ray does not show why a task ends its process
            logging.getLogger("phalanx").error(message)
        raise SystemExit(message) from error
    gc.freeze()  # half a million imported objects stay: later collections need not visit them
else:
    from phalanx.compat.verl.overlay import register_row_types

    register_row_types()
