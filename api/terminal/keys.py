"""`penstock key`: a new API key, for the file of --api-keys-file."""

from __future__ import annotations

import re
import secrets
from typing import Annotated

import typer

from ...config.api_keys import ApiKey
from ...schemas.jobs import TOKEN_PATTERN


def make_key(
    tenant: Annotated[
        str, typer.Argument(help="The tenant that gets the key. Tenants share no quota, prefix or answer.")
    ],
    max_priority: Annotated[
        str | None, typer.Option(help="The highest priority that its requests may have: high, normal or low.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may also change models: load, unload, add, remove and swap them.")
    ] = False,
) -> None:
    """Make an API key and print its line for the file of --api-keys-file."""
    if re.fullmatch(TOKEN_PATTERN, tenant) is None:
        raise typer.BadParameter("a tenant's name may hold only letters, digits, '_' and '-', at most 64")
    key = f"sk-penstock-{secrets.token_urlsafe(32)}"
    try:
        entry = ApiKey.parse(
            f"{tenant}={key}" + (f" max_priority={max_priority}" if max_priority else "") + (" admin" if admin else "")
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print(f"The key, shown only now:\n{key}\n\nIts line for the file:\n{entry}")
