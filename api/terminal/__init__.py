"""What a person uses in a terminal: chat, dead letters, the configuration."""
