"""Commands for the terminal: chat, dead letters, the configuration, and others."""
