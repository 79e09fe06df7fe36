"""Faults of a bridge and its tools that can be found before anything starts."""

from __future__ import annotations

from ..api.grpc import check_grpc
from ..config.api_keys import Keys
from ..config.settings import Settings


def check_front(settings: Settings) -> None:
    """Raise `ConfigurationError` for faults of keys and tools, and as `check_grpc` does."""
    check_grpc(settings)
    Keys(settings.api_keys or (), settings.api_keys_file)
    if settings.mcp_config or settings.mcp_allowed_urls or settings.tool_functions:
        from ..api.tools.toolbox import toolbox_of  # imports the MCP client, which few processes need

        toolbox_of(settings)
