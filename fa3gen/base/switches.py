"""What somebody turns on in the environment, for a whole process."""

from __future__ import annotations

import os


def turned_on(variable: str) -> bool:
    """Whether an environment variable asks for what it names; where it is empty or 0, it does not."""
    return os.environ.get(variable, "") not in ("", "0")
