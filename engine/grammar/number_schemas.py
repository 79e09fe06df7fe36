"""What a rewritten schema says of a number: its bounds and what it is a multiple of, as xgrammar enforces it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor, inf
from typing import Any

from .schema_keywords import fault

INT64 = 2**63
_MAX_MULTIPLE = 1024  # above which xgrammar gives up
_DECIMALS = 6  # of the numbers that xgrammar finds between two bounds; if there are none, it writes nothing


def number_node(kind: str, rest: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The keywords of a node for numbers, or for whole ones. Raises `InvalidRequest`."""
    step = rest.get("multipleOf")
    rest = {name: value for name, value in rest.items() if name != "multipleOf"}
    if kind == "integer":  # its bounds made whole and inclusive
        lows, highs = _multiples(rest, 1)
        if max(lows, default=0) >= INT64 or min(highs, default=0) < -INT64:
            raise fault(path, "whole numbers have at most 64 bits")
        rest = ({"minimum": max(*lows, -INT64)} if lows else {}) | (
            {"maximum": min(*highs, INT64 - 1)} if highs else {}
        )
    low, high, below = rest.get("minimum", -inf), rest.get("maximum", inf), rest.get("exclusiveMaximum", inf)
    if low > high or low >= below or rest.get("exclusiveMinimum", -inf) >= min(high, below):
        raise fault(path, "allows no number between its bounds")
    lows, highs = _multiples(rest, 10**_DECIMALS)
    if lows and highs and max(lows) > min(highs):
        raise fault(path, f"allows no number of {_DECIMALS} decimals between its bounds", "unsupported_schema")
    if step is None:
        return rest
    if kind == "number" or rest or step != floor(step) or not 1 <= step <= _MAX_MULTIPLE:
        raise fault(
            f"{path}.multipleOf",
            f"only whole numbers from 1 to {_MAX_MULTIPLE}, of an integer without bounds, can be enforced",
            "unsupported_schema",
        )
    return {"multipleOf": int(step)}


def _multiples(rest: Mapping[str, Any], parts: int) -> tuple[list[int], list[int]]:
    """The bounds below and above, each as the next number of `1 / parts` within it."""
    exact = {name: Fraction(repr(bound)) * parts for name, bound in rest.items()}
    lows = [ceil(exact["minimum"])] if "minimum" in exact else []
    lows += [floor(exact["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in exact else []
    highs = [floor(exact["maximum"])] if "maximum" in exact else []
    highs += [ceil(exact["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in exact else []
    return lows, highs
