"""The settings by which tenants share a deployment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode

from ..schemas.jobs import TOKEN_PATTERN
from .models import split_commas

_is_tenant = re.compile(TOKEN_PATTERN).fullmatch
_is_weight = re.compile(r"[0-9]+(\.[0-9]+)?").fullmatch


def _pairs(value: object) -> object:
    return [f"{name}={number}" for name, number in value.items()] if isinstance(value, dict) else split_commas(value)


class TenantSettings(BaseSettings):
    """A part of `Settings`."""

    tenant_seats: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Share of a worker's seats that one tenant may take while another has sent requests in the last "
        "minute.",
    )
    tenant_weights: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_pairs)] = Field(
        (),
        description="TENANT=WEIGHT, several with commas: where tenants wait, one of weight 2 gets twice as many tokens "
        "as one of weight 1, which is that of all others. In TOML a table, too.",
    )

    @field_validator("tenant_weights")
    @classmethod
    def _weights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        tenants = [entry.partition("=")[0] for entry in value]
        for entry in value:
            tenant, _, weight = entry.partition("=")
            if not _is_tenant(tenant) or not _is_weight(weight) or not float(weight):
                raise ValueError(f"{entry!r} is not TENANT=WEIGHT, such as ada=2")
        if twice := sorted({tenant for tenant in tenants if tenants.count(tenant) > 1}):
            raise ValueError(f"{', '.join(twice)}: has two weights")
        return value

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the tenants that have one of their own."""
        return {tenant: float(weight) for tenant, _, weight in (entry.partition("=") for entry in self.tenant_weights)}
