"""Base models: of what clients send, and of what Penstock publishes and stores."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    ValidationInfo,
)
from pydantic_core import CoreSchema

from .integers import integral

MAX_TOOL_NAME = 128  # characters
MAX_TOOLS = 1024  # of a request; a grammar over so many takes two seconds to compile
TOOL_NAME_PATTERN = rf"^[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME}}}$"

ToolName = Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]


class Strict(BaseModel):
    """Immutable; pydantic converts no types and refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Sent(Strict):
    """What a client sends. An integer may be written as 4.0, which JSON does not tell from 4: so do Lua, PHP and R."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return integral(handler(source))


class Record(Strict):
    """What one process publishes or stores for another; unknown fields, of a newer version, are ignored."""

    model_config = ConfigDict(extra="ignore")


def not_above(other: str) -> AfterValidator:
    """Refuses a value above that of the field `other`, which stands before this one; either may be None."""

    def checked(value: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get(other)
        if value is not None and most is not None and value > most:
            raise ValueError(f"{value} is above {other}={most}; give a smaller one")
        return value

    return AfterValidator(checked)


def held_as(kind: object) -> GetPydanticSchema:
    """Validates and holds a field as `kind`, where its annotation is what a caller may give, for type checkers."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


def tool_name(text: str) -> str:
    """`text` as a `ToolName`: other characters become underscores, and what is too long is cut."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:MAX_TOOL_NAME] or "_"
