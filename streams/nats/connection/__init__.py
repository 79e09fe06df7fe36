"""One connection to NATS: how it proves who it is, how it is opened, and what passes over it."""
