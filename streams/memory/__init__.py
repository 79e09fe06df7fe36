"""The broker in one process's memory."""
