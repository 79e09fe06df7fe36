"""Candidates in a list, of which each choice looks at all: what the orders of a fleet must agree with."""

from __future__ import annotations

from penstock.stages.batch.scheduling import Candidate


class Listed(list[Candidate]):
    def after(self, worker: str) -> Candidate:
        ordered = sorted(self, key=lambda one: one.worker)
        return next((one for one in ordered if one.worker > worker), ordered[0])

    def least_active(self, after: str) -> Candidate:
        fewest = min(one.active for one in self)
        return Listed(one for one in self if one.active == fewest).after(after)

    def roomiest(self) -> Candidate:
        ordered = sorted(self, key=lambda one: one.worker)
        return max(ordered, key=lambda one: (one.free_tokens, -one.active))
