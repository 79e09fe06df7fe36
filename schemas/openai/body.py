"""What the bodies of requests have in common: how strictly they are read, and the name of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from ..base import Sent
from ..bounds import bounded
from ..errors import InvalidRequest

MOST_MODEL = 256  # characters of a model's name
ModelName = Annotated[str, Field(min_length=1, max_length=MOST_MODEL)]


def model_of(body: Mapping[str, Any]) -> str:
    """The model that a response to this unvalidated body names; empty if its validation will fail."""
    model = body.get("model")
    return model if isinstance(model, str) and len(model) <= MOST_MODEL else ""


class Unsupported(NamedTuple):
    """A field that would change the answer and is not supported: refused unless its value is one of `neutral`."""

    neutral: tuple[Any, ...] = (None,)
    advice: str = "leave it out"


class Body(Sent):
    """A request or a part of one. Its validation stops early at faults, so that it is cheap for every input."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = MappingProxyType({})

    @classmethod
    @cache
    def field_names(cls) -> frozenset[str]:
        """Every known field, including the unsupported ones."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items()) | cls.unsupported.keys()

    @classmethod
    def supported(cls, body: Mapping[str, Any]) -> dict[str, Any]:
        """`body` without its unsupported fields. Raises `InvalidRequest` if one is not neutral."""
        for name in cls.unsupported.keys() & body.keys():
            neutral, advice = cls.unsupported[name]
            if body[name] not in neutral:
                fault = f"{name} is not supported here; {advice}."
                raise InvalidRequest(fault, code="unsupported_parameter", param=name)
        return {name: value for name, value in body.items() if name not in cls.unsupported}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return bounded(super().__get_pydantic_core_schema__(source, handler))


class OpenBody(Body):
    """A part of a request whose unknown fields are ignored: messages, calls and tools, in which clients keep fields of
    other servers, and options that only ask for more output."""

    model_config = ConfigDict(extra="ignore")
