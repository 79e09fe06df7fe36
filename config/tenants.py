"""The settings by which tenants share a deployment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from ..schemas.jobs import TOKEN_PATTERN
from ..schemas.rates import Limits
from .models import split_commas

_is_tenant = re.compile(TOKEN_PATTERN).fullmatch
_is_weight = re.compile(r"[0-9]+(\.[0-9]+)?").fullmatch
_is_limit = re.compile(r"[1-9][0-9]{0,14}|none").fullmatch


def _pairs(value: object) -> object:
    if value in ("none", ["none"]):
        return []
    return [f"{name}={number}" for name, number in value.items()] if isinstance(value, dict) else split_commas(value)


class TenantSettings(BaseModel):
    """A part of `Settings`."""

    tenant_seats: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Most of a worker's seats that one tenant may take, as a share, while another has sent requests in "
        "the last minute. It leaves more where the others lately needed more, down to an equal share.",
    )
    tenant_weights: Annotated[tuple[str, ...], BeforeValidator(_pairs)] = Field(
        (),
        description="TENANT=WEIGHT, several with commas: where tenants wait, one of weight 2 gets twice as many tokens "
        "as one of weight 1, which is that of all others. In TOML a table, too.",
    )

    requests_per_minute: int | None = Field(
        None, ge=1, description="Most requests a minute of each tenant, before 429; no limit by default."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Most tokens a minute, of prompts and answers together, of each tenant, before 429; no limit by "
        "default.",
    )
    tenant_requests_per_minute: Annotated[tuple[str, ...], BeforeValidator(_pairs)] = Field(
        (),
        description="TENANT=NUMBER, several with commas: tenants with a requests_per_minute of their own, or with "
        "none. In TOML a table, too.",
    )
    tenant_tokens_per_minute: Annotated[tuple[str, ...], BeforeValidator(_pairs)] = Field(
        (),
        description="TENANT=NUMBER, several with commas: tenants with a tokens_per_minute of their own, or with none. "
        "In TOML a table, too.",
    )

    @field_validator("tenant_weights")
    @classmethod
    def _weights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            tenant, _, weight = entry.partition("=")
            if not _is_tenant(tenant) or not _is_weight(weight) or not float(weight):
                raise ValueError(f"{entry!r} is not TENANT=WEIGHT, such as ada=2")
        return _once(value, "weights")

    @field_validator("tenant_requests_per_minute", "tenant_tokens_per_minute")
    @classmethod
    def _limits(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            tenant, _, limit = entry.partition("=")
            if not _is_tenant(tenant) or not _is_limit(limit):
                raise ValueError(f"{entry!r} is not TENANT=NUMBER, such as ada=600 or ada=none")
        return _once(value, "limits")

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the tenants that have one of their own."""
        return {tenant: float(weight) for tenant, _, weight in (entry.partition("=") for entry in self.tenant_weights)}

    @property
    def rate_limits(self) -> Mapping[str, Limits]:
        """By tenant, with "" for all that have none of their own; empty where nobody has any."""
        requests, tokens = _numbers(self.tenant_requests_per_minute), _numbers(self.tenant_tokens_per_minute)
        limits = {
            tenant: Limits(
                requests.get(tenant, self.requests_per_minute),
                tokens.get(tenant, self.tokens_per_minute),
            )
            for tenant in ("", *requests, *tokens)
        }
        return limits if any(limits.values()) else {}


def _numbers(entries: tuple[str, ...]) -> dict[str, int | None]:
    return {
        tenant: None if limit == "none" else int(limit)
        for tenant, _, limit in (entry.partition("=") for entry in entries)
    }


def _once(value: tuple[str, ...], what: str) -> tuple[str, ...]:
    tenants = [entry.partition("=")[0] for entry in value]
    if twice := sorted({tenant for tenant in tenants if tenants.count(tenant) > 1}):
        raise ValueError(f"{', '.join(twice)}: has two {what}")
    return value
