"""The broker in one process's memory."""

from .broker import MemoryBroker

__all__ = ["MemoryBroker"]
