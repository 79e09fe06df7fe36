"""Tools that requests may use: MCP servers and Python functions."""
