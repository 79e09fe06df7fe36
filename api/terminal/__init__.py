"""Commands for the terminal: here those that need no server, in rooms those that use one over HTTP or NATS."""
