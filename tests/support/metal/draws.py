"""How many examples hypothesis draws for a kernel."""

from __future__ import annotations

import os


def draws(examples: int) -> int:
    """Return so many, times $METAL_DRAWS: below 1 for a quick look, above for a long one."""
    return max(1, round(examples * float(os.environ.get("METAL_DRAWS", "1"))))
