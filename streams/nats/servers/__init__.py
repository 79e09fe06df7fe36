"""The nats-servers that Penstock starts, and the configuration of users for those that others run."""
