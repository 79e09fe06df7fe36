"""The models of a deployment, and how each is to be served.

A revision is one source of a model's weights and tokenizer. Requests are bound to the current revision where their
prompt is tokenised, and it serves them to their end; a swap adds a newer revision beside it, which becomes the current
one when it is ready. A number is never used twice for a name, not even after the model was removed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator

from ..base import Record
from ..errors import InvalidRequest, ModelNotFound
from ..params import GenerationParams

DEFAULTS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "seed",
)

_NEAREST = 3  # names that an error suggests
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_keep_alive(value: object) -> float | None:
    """Seconds that an idle model stays loaded, None for ever, from one of Ollama's forms.

    These are a duration with units ("5m", "1h30m"), a number of seconds, 0 for "unload as soon as it is idle", and
    anything negative for ever. Raises `ValueError`.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
        return None if value < 0 else float(value)
    if isinstance(value, str):
        text = value.strip()
        size = text.removeprefix("-")
        seconds = _parse_duration(size)
        if seconds is not None:
            return None if size != text else seconds
    raise ValueError(
        'must be a duration such as "5m" or "1h30m", a number of seconds, 0 (unload at once) or -1 (never)'
    )


def _parse_duration(text: str) -> float | None:
    if re.fullmatch(r"\d{1,15}(\.\d*)?", text):
        return float(text)
    if not text or _DURATION.sub("", text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def _check_path(path: str) -> str:
    if "," in path:
        raise ValueError("must have no comma in its path; rename the directory")
    return path


ModelName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f\x7f]+$")]
AdapterName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f\x7f,=]+$")]
AdapterPath = Annotated[str, Field(min_length=1), AfterValidator(_check_path)]
Source = Annotated[str, Field(min_length=1)]


class RevisionKey(NamedTuple):
    """Names one revision of one model, or one of its replicas: the first without `replica`."""

    name: str
    revision: int
    replica: int = 0

    @property
    def first(self) -> Self:
        """The revision itself, whichever of its replicas this is."""
        return self if self.replica == 0 else self._replace(replica=0)


class Revision(Record):
    """`source` is a directory, a GGUF file or a Hugging Face id."""

    number: Annotated[int, Field(ge=1)]
    source: Source


class FailedSwap(Record):
    """A swap that left the former revision serving: the revision that was tried, and why it does not serve."""

    revision: int
    source: str
    reason: str


class CatalogueEntry(Record):
    """One model of the catalogue: where it comes from, and how it is served.

    `source` is that of `revision`, the current one; `others` are the further live ones: older ones finish the requests
    that were bound to them, and a newer one is being tried by a swap; `failed_swap` is the last one if it has failed.
    The engine's settings mean what those of the command line mean. A model with `pin` is never unloaded to make room,
    one with `preload` is loaded before the first request; either is loaded again after its worker or host has ended.
    An idle model is unloaded after `keep_alive` seconds (None: only when another one needs its memory). While the model
    is not loaded, at most `queue_limit` requests wait for it, each at most `wait_limit` seconds. `defaults` are the
    sampling parameters of requests that leave them out. `adapters` are the directories of LoRA adapters, each by a
    model name of its own. `device` may name several, with commas between them: then it has a replica on each, if
    `replicas` does not say how many.
    """

    version: Literal[1] = 1
    name: ModelName
    source: Source
    revision: Annotated[int, Field(ge=1)] = 1
    others: Annotated[tuple[Revision, ...], Field(strict=False)] = ()
    failed_swap: FailedSwap | None = None
    aliases: Annotated[tuple[ModelName, ...], Field(strict=False)] = ()
    backend: Annotated[str, Field(min_length=1)] = "paged"
    dtype: Literal["bfloat16", "float32", "float16", "auto"] = "bfloat16"
    quantization: Annotated[str, Field(min_length=1)] | None = None
    device: Annotated[str, Field(min_length=1)] = "auto"
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    max_sequence_length: Annotated[int, Field(ge=2)] | None = None
    kv_cache_memory: Annotated[int, Field(gt=0)] | None = None
    tool_format: Annotated[str, Field(min_length=1)] = "auto"
    reasoning_format: Annotated[str, Field(min_length=1)] = "auto"
    pin: bool = False
    preload: bool = False
    keep_alive: Annotated[float, Field(ge=0)] | None = None
    queue_limit: Annotated[int, Field(ge=0)] = 10
    wait_limit: Annotated[float, Field(gt=0)] = 30.0
    defaults: dict[str, Any] = Field(default_factory=dict)
    adapters: dict[AdapterName, AdapterPath] = Field(default_factory=dict)

    @field_validator("device", mode="before")
    @classmethod
    def _joined(cls, value: object) -> object:
        is_list = isinstance(value, list | tuple) and value and all(isinstance(each, str) and each for each in value)
        return ",".join(value) if is_list else value  # type: ignore[arg-type]

    @field_validator("keep_alive")
    @classmethod
    def _agrees(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("pin"):
            raise ValueError("a pinned model is never unloaded: set keep_alive to -1, or leave pin or keep_alive out")
        if value == 0 and info.data.get("preload"):
            raise ValueError(
                "0 would unload at once what preload has loaded: set a longer keep_alive, or leave preload out"
            )
        return value

    @field_validator("defaults")
    @classmethod
    def _are_sampling_parameters(cls, value: dict[str, Any]) -> dict[str, Any]:
        faults = [f"{name} cannot have a default here" for name in value if name not in DEFAULTS]
        try:
            GenerationParams.model_validate({name: each for name, each in value.items() if name in DEFAULTS})
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            faults += [f"{fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')}" for fault in found]
        if faults:
            raise ValueError(f"{'; '.join(faults)} (possible: {', '.join(DEFAULTS)})")
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use."""
        return (self.name, *self.aliases, *self.adapters)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(each.strip() for each in self.device.split(","))

    @property
    def num_replicas(self) -> int:
        return self.replicas or len(self.devices)

    @property
    def sources(self) -> dict[int, str]:
        """The source of each live revision, by number."""
        return {self.revision: self.source} | {each.number: each.source for each in self.others}

    @property
    def candidate(self) -> int | None:
        """The revision that a swap is trying, if any."""
        newest = max(self.sources)
        return newest if newest > self.revision else None


class Catalogue(Record):
    """All models of a deployment. Its methods return a changed one, and leave this as it is.

    Every name and alias belongs to one model. `newest` is the highest revision that each name, removed ones included,
    has had.
    """

    version: Literal[1] = 1
    entries: Annotated[tuple[CatalogueEntry, ...], Field(strict=False)] = ()
    newest: dict[str, int] = Field(default_factory=dict)

    def find(self, name: str) -> CatalogueEntry:
        """The model called `name`, by its name or an alias. Raises `ModelNotFound`, which suggests similar names."""
        for entry in self.entries:
            if name in entry.names:
                return entry
        known = [each for entry in self.entries for each in entry.names]
        near = difflib.get_close_matches(name, known, n=_NEAREST)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none yet'}."
        raise ModelNotFound(f"There is no model {name!r}; {hint}", param="model")

    def has_had(self, key: RevisionKey) -> bool:
        """Whether it is or was a revision of one of the models."""
        return key.revision <= self.newest.get(key.name, 0)

    def add(self, entry: CatalogueEntry) -> Self:
        """Add a model, whose revision gets a number that is new. Raises `InvalidRequest` if a name is taken."""
        if taken := [name for other in self.entries for name in other.names if name in entry.names]:
            raise InvalidRequest(
                f"{', '.join(map(repr, taken))}: already a model's name or alias; remove that one first, or choose "
                "another name",
                code="model_exists",
                param="name",
            )
        if len({*entry.names}) < len(entry.names):
            raise InvalidRequest(f"{entry.name}: a name or alias is given twice; give each once", param="aliases")
        number = self.newest.get(entry.name, 0) + 1
        added = entry.model_copy(update={"revision": number, "others": ()})
        return self._with((*self.entries, added), {entry.name: number})

    def offer(self, entries: Sequence[CatalogueEntry]) -> Self:
        """Make `entries` all that there is. A model whose source is the same keeps its revision.

        One whose source has changed gets a new revision, which counts at once; its former ones finish their requests.
        Raises `InvalidRequest` if a name is given twice.
        """
        known = {entry.name: entry for entry in self.entries}
        changed = self._with(())
        for entry in entries:
            former = known.get(entry.name)
            if former is not None and former.source == entry.source:
                kept = {name: getattr(former, name) for name in ("revision", "others", "failed_swap")}
                changed = changed._with((*changed.entries, entry.model_copy(update=kept)))
                continue
            changed = changed.add(entry)
            if former is not None:
                others = tuple(Revision(number=number, source=each) for number, each in former.sources.items())
                changed = changed._with(changed._changed(changed.entries[-1], others=others))
        return changed

    def remove(self, name: str) -> Self:
        """Raises `ModelNotFound`."""
        found = self.find(name)
        return self._with(tuple(entry for entry in self.entries if entry is not found))

    def swap(self, name: str, source: str) -> Self:
        """Add a revision with this source, to be tried. Raises `ModelNotFound` and `InvalidRequest`."""
        found = self.find(name)
        if found.candidate is not None:
            raise InvalidRequest(
                f"{found.name} is already being swapped, to {found.sources[found.candidate]}; wait for its end",
                code="swap_in_progress",
                param="model",
            )
        try:
            candidate = Revision(number=self.newest.get(found.name, 0) + 1, source=source)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise InvalidRequest(f"{source!r}: {reason}", param="source") from None
        others = (*found.others, candidate)
        return self._with(self._changed(found, others=others, failed_swap=None), {found.name: candidate.number})

    def promote(self, key: RevisionKey) -> Self:
        """Make the revision of a swap the current one; the former stays live for its requests.

        Raises `ModelNotFound` if there is no such live revision, and `ValueError` for a former one.
        """
        found = self._holder(key)
        if key.revision == found.revision:
            return self
        if key.revision < found.revision:
            raise ValueError(f"revision {key.revision} of {key.name} is a former one: swap to its source instead")
        others = tuple(each for each in found.others if each.number != key.revision)
        former = Revision(number=found.revision, source=found.source)
        return self._with(
            self._changed(found, source=found.sources[key.revision], revision=key.revision, others=(former, *others))
        )

    def retire(self, key: RevisionKey, failure: str | None = None) -> Self:
        """Drop a revision that is not the current one: its requests have ended, or its swap has failed for a reason.

        Raises `ModelNotFound`, and `ValueError` for the current revision.
        """
        found = self._holder(key)
        if key.revision == found.revision:
            raise ValueError(f"revision {key.revision} of {key.name} is the current one: remove the model instead")
        changes: dict[str, object] = {"others": tuple(each for each in found.others if each.number != key.revision)}
        if failure is not None:
            source = found.sources[key.revision]
            changes["failed_swap"] = FailedSwap(revision=key.revision, source=source, reason=failure)
        return self._with(self._changed(found, **changes))

    def as_asked(self, asked: Mapping[RevisionKey, float | None]) -> Self:
        """The catalogue with the `keep_alive` that requests have asked for: negative for ever, None for no other."""
        entries = list(self.entries)
        for index, entry in enumerate(entries):
            if (seconds := asked.get(RevisionKey(entry.name, entry.revision))) is not None:
                entries[index] = entry.model_copy(update={"keep_alive": None if seconds < 0 else seconds})
        return self._with(tuple(entries))

    def _holder(self, key: RevisionKey) -> CatalogueEntry:
        found = self.find(key.name)
        if key.revision not in found.sources:
            raise ModelNotFound(f"There is no revision {key.revision} of the model {found.name!r}.", param="model")
        return found

    def _changed(self, entry: CatalogueEntry, **values: object) -> tuple[CatalogueEntry, ...]:
        changed = entry.model_copy(update=values)
        return tuple(changed if each is entry else each for each in self.entries)

    def _with(self, entries: tuple[CatalogueEntry, ...], newest: dict[str, int] | None = None) -> Self:
        return self.model_copy(update={"entries": entries, "newest": self.newest | (newest or {})})
