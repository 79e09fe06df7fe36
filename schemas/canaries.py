"""Canary requests: those by which a bridge finds out whether requests are answered. Nobody's work, and not counted."""

from __future__ import annotations

CANARY = "_canary"  # their tenant
