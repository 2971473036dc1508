"""The base of everything that is kept as JSON and read again."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Base of all parts of a record: closed against unknown keys, so that a record says what it seems to say."""

    model_config = ConfigDict(extra="forbid", frozen=True)
