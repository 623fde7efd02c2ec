"""Why a receiver fences a session: names for counters."""

from typing import Final

STALLED: Final = "stalled"
"""It may have reserved room and not filled it within the lease; or what it offered cannot be had."""
REPLACED: Final = "replaced"
"""Its sender has come back and opened another one."""
REFUSED: Final = "refused"
"""Nothing is taken from its sender any more."""
FENCE_REASONS: Final = (STALLED, REPLACED, REFUSED)
