"""Commands that use a deployment by its broker, as its own parts do."""
