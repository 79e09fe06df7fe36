"""The laws of `walk_models.py`: what models and requests of real processes may do, whatever happens. It has no clock.

What it judges comes from outside: the stored states and catalogues in the order in which they were written, and what
clients have got. It shares with the product only the table of transitions and the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.schemas.errors import ModelNotFound
from penstock.schemas.models.catalogue import Catalogue, RevisionKey
from penstock.schemas.models.model_state import RESIDENT, TRANSITIONS, ModelState, ModelStatus

LAG = 5.0  # seconds after which every part knows a change of the catalogue
DEATHS = 4  # of a model's workers in a row, after which its requests may be refused


def may_follow(before: ModelState, after: ModelState, missed: bool = False) -> bool:
    """Whether a stored state may follow another; `missed`: others may have been stored between them."""
    if after.status == before.status or (after.status == "unloaded" and after.reason == "its host has stopped"):
        return True
    reached: set[ModelStatus] = {*TRANSITIONS[before.status]}
    while missed and (more := {each for status in reached for each in TRANSITIONS[status]} - reached):
        reached |= more
    return after.status in reached


@dataclass
class Asked:
    """A request and what became of it; times by the monotonic clock, `ended` is None until then."""

    model: str  # not its alias
    prompt: str
    tokens: int
    sent: float
    ended: float | None = None
    text: str = ""
    finish: str | None = None
    status: int = 0
    code: str | None = None
    message: str = ""
    given_up: bool = False


@dataclass
class Laws:
    """`needs` are the bytes of each model, `capacities` those that each agent has for models."""

    needs: Mapping[str, int]
    capacities: Mapping[str, int]
    broken: list[str] = field(default_factory=list)
    states: dict[RevisionKey, ModelState] = field(default_factory=dict)
    catalogues: list[tuple[float, Catalogue]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)  # the model of each worker that was killed
    transitions: int = 0
    missed: int = 0

    @property
    def catalogue(self) -> Catalogue:
        return self.catalogues[-1][1] if self.catalogues else Catalogue()

    def see_catalogue(self, catalogue: Catalogue, now: float) -> None:
        self.catalogues.append((now, catalogue))

    def see_state(self, after: ModelState, missed: int) -> None:
        """A stored state, before which `missed` writes of any key were replaced before they could be seen."""
        before = self.states.get(after.key, ModelState(**after.key._asdict()))
        self.transitions += after.status != before.status
        self.missed += missed
        if not may_follow(before, after, missed=missed > 0):
            self._break("states change along the table", f"{before} → {after}")
        if after.status == "draining" and before.status == "ready" and after.reason:
            wanted = after.reason.removesuffix(" needs its memory")
            if wanted not in (after.reason, after.name) and self._is_pinned(after):
                self._break("what is pinned stays", f"{after}")
        self.states[after.key] = after
        for agent, capacity in self.capacities.items():
            held = [state for state in self.states.values() if state.status in RESIDENT and state.agent == agent]
            if sum(self.needs[state.name] for state in held) > capacity:
                names = ", ".join(f"{state.name} {state.revision} {state.status}" for state in held)
                self._break("models fit into the memory", f"{agent} holds {names}")

    def judge(self, asked: Asked, texts: Mapping[str, str]) -> None:
        """Judge a request that has ended; `texts` are the whole answers by the source of a revision."""
        if asked.given_up:
            return
        assert asked.ended is not None
        begun = self.catalogues[0][0]
        when = f"{asked.sent - begun:.1f} to {asked.ended - begun:.1f} s"
        what = f"{asked.model}, {when}, {asked.status} {asked.code}: {asked.message}"
        sources = set(self._sources(asked.model, asked.sent - LAG, asked.ended))
        if asked.status != 200 or asked.code is not None:
            if not self._is_honest(asked, sources):
                self._break("only what cannot be served is refused", what)
        elif asked.finish != "length":
            self._break("answers are whole", f"{what}, finish reason {asked.finish}")
        elif asked.text not in {texts[source] for source in sources - {""}}:
            self._break("an answer is of one revision", f"{what}: {asked.text!r}, none of {sources}")

    @property
    def unrest(self) -> list[str]:
        """The models that are on their way to another state or revision."""
        swaps = [f"{entry.name} is swapped" for entry in self.catalogue.entries if entry.candidate is not None]
        return swaps + [
            f"{key.name} {key.revision} {state.status}"
            for key, state in sorted(self.states.items())
            if state.status in ("queued", "loading", "draining")
        ]

    def _sources(self, model: str, since: float, until: float) -> Iterator[str]:
        """Of the current revision, at any time between; empty where there was no such model."""
        ends = [now for now, _ in self.catalogues[1:]] + [until + 1.0]
        for (begun, catalogue), end in zip(self.catalogues, ends, strict=True):
            if begun <= until and end >= since:
                try:
                    yield catalogue.find(model).source
                except ModelNotFound:
                    yield ""

    def _is_honest(self, asked: Asked, sources: set[str]) -> bool:
        """Whether a refusal says what is so, as the documentation has it."""
        match asked.code:
            case "model_not_found":
                return "" in sources
            case "model_unavailable" if "was removed" in asked.message:
                return "" in sources
            case "model_unavailable" if "could not be loaded" in asked.message:
                return self.deaths.count(asked.model) >= DEATHS
        return False

    def _is_pinned(self, state: ModelState) -> bool:
        try:
            entry = self.catalogue.find(state.name)
        except ModelNotFound:
            return False
        return entry.pin and entry.revision == state.revision

    def _break(self, law: str, detail: str) -> None:
        self.broken.append(f"{law}: {detail}")
