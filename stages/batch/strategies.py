"""The strategies by name, as the setting `scheduling` and `penstock scheduling` know them."""

from __future__ import annotations

from .prefixes import PrefixAware
from .scheduling import LeastLoaded, MemoryAware, RoundRobin, Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "memory_aware": MemoryAware,
    "prefix_aware": PrefixAware,
}
