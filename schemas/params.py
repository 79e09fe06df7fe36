"""The sampling parameters of one request. Values out of range are refused, never clamped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .base import Strict, held_as

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_PLUG_INS = 8  # of each kind


class Grammar(Strict):
    """A constraint on an answer, in a form that xgrammar compiles.

    `text` is a JSON Schema, a regular expression, a grammar in GBNF with the rule `root`, or a structural tag, which
    mixes free text with any of these (https://xgrammar.mlc.ai/docs), as JSON.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: Annotated[str, Field(min_length=1)]


class PlugInUse(Strict):
    """A generation plug-in that a request names, with its arguments; a text is the name alone."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


# Any: a name, or a mapping, becomes a `PlugInUse`.
PlugInUses = Annotated[
    Sequence[PlugInUse | Any], held_as(tuple[PlugInUse, ...]), Field(max_length=MAX_PLUG_INS, strict=False)
]
TokenIds = Annotated[Sequence[int], held_as(tuple[Annotated[int, Field(ge=0)], ...]), Field(strict=False)]
Stops = Annotated[
    Sequence[str],
    held_as(tuple[Annotated[str, Field(min_length=1)], ...]),
    Field(max_length=MAX_STOPS, strict=False),
]


class GenerationParams(Strict):
    """Sampling parameters of one request.

    Defaults are the library's; over HTTP `max_tokens` defaults to what is left of the context instead.
    `temperature` 0 is greedy. `logprobs` is the number of alternatives to report beside each chosen token (0: the
    chosen token alone), None to report nothing; `prompt_logprobs` is the same for the prompt's tokens.
    `logit_bias` maps token ids to an addend in logits. `grammar` constrains the answer.
    `visible_token_ids` are special tokens that appear in the text; without `spaces_between_special_tokens` no space
    separates two of them. `logits_processors`, `stopping_criteria` and `clean_ups` are generation plug-ins, in the
    order in which they work: names, or names with arguments. Lists become tuples.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 256
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    stop: Stops = ()
    stop_token_ids: TokenIds = ()
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    ignore_eos: bool = False
    grammar: Grammar | None = None
    visible_token_ids: TokenIds = ()
    spaces_between_special_tokens: bool = True
    logits_processors: PlugInUses = ()
    stopping_criteria: PlugInUses = ()
    clean_ups: PlugInUses = ()

    @property
    def plug_ins(self) -> tuple[PlugInUse, ...]:
        """The generation plug-ins of all kinds."""
        return (*self.logits_processors, *self.stopping_criteria, *self.clean_ups)

    @field_validator("prompt_logprobs", mode="before")
    @classmethod
    def _was_a_flag(cls, value: object, info: ValidationInfo) -> object:
        # Earlier releases wrote whether the prompt's tokens had as many alternatives as the answer's, or none.
        if info.mode == "json" and isinstance(value, bool):
            return info.data.get("logprobs") if value else None
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _keys_are_token_ids(cls, value: object) -> object:
        # JSON has no integer keys, so token ids arrive as strings.
        if not isinstance(value, dict):
            return value
        try:
            return {int(key): bias for key, bias in value.items()}
        except (TypeError, ValueError):
            raise ValueError("keys must be token ids") from None

    @field_validator("logit_bias")
    @classmethod
    def _ids_are_not_negative(cls, value: dict[int, float]) -> dict[int, float]:
        if any(token < 0 for token in value):
            raise ValueError("token ids must not be negative")
        return value

    @field_validator("min_tokens")
    @classmethod
    def _minimum_fits(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("max_tokens")
        if most is not None and value > most:
            raise ValueError(f"{value} is above the {most} tokens allowed")
        return value
