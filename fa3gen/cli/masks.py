"""The words by which options name masks."""

from __future__ import annotations

import re

HELP = "Only this mask, as `fa3gen list` shows it: none, causal, 'window 512, 0'; or window512_0. May be repeated."


def name(word: str) -> str:
    """The name of a mask (`mask_label`) for what `fa3gen list` shows: `window512_0` for `window 512, 0`.

    Other words stay as they are, names among them.
    """
    if word == "none":
        return "full"
    if shown := re.fullmatch(r"window (\d+), ?(\d+)", word):
        return f"window{shown[1]}_{shown[2]}"
    return word.replace(" ", "_")
