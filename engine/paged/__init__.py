"""Continuous batching over block-paged keys and values: the default backend, from its scheduler to its kernels."""
