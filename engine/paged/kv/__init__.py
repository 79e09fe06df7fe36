"""The blocks of keys and values: how many fit, who holds which, and their memory."""
