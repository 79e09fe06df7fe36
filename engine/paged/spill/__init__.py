"""Cached prefixes on disk, where they survive their process: files, threads, and what makes numbers comparable."""
