"""Penstock: an LLM inference server built as a pipeline over NATS JetStream, with its own engine.

The library's names live in `penstock.engine`; the stage contract in `penstock.stages`; the command line in `penstock`.
"""

__version__ = "0.1.0"
