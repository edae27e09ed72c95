"""What Python's garbage collector looks at."""

from __future__ import annotations

import gc

# Containers more than at the last look. Python says 700, which one request has. What waits for a look, in cycles that
# failed calls leave, may hold prompts and frames: hence not many more.
_LOOK_AFTER = 3_000


def spare_what_is_loaded() -> None:
    """Call it once all is loaded: what is there now stays until the end of the process, and is not looked at again.

    A look at everything stops the event loop for 80 ms in a router, and took a twentieth of its time under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_LOOK_AFTER)
