"""A scenario: what is simulated, read from TOML. A file is refused with all of its faults at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config.files import read_toml
from ..config.settings import Settings
from ..schemas.errors import ConfigurationError
from ..schemas.jobs import Priority, SubjectToken
from .costs import StepCosts

# As `penstock bench engine penstock-nano` measured the bundled model on one core of a virtual machine (Zen 4), after 64
# and after 512 tokens.
BUNDLED_COSTS = StepCosts(
    prefill_us=16.2,
    prefill_context_us=0.071,
    decode_ms={"1": 0.131, "2": 0.149, "4": 0.193, "8": 0.375, "16": 0.856, "32": 2.34},
    context=80,
    context_us=0.134,
)

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, strict=False)]
Above0 = Annotated[float, Field(gt=0, strict=False)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Lengths(Part):
    """Numbers of tokens: log-normal around `mean`, of which the logarithm has the standard deviation `spread`."""

    mean: Above0
    spread: Annotated[float, Field(ge=0, le=3, strict=False)] = 0.0
    min: Count = 1
    max: Count = 100_000

    @model_validator(mode="after")
    def _has_room(self) -> Lengths:
        if not self.min <= self.mean <= self.max:
            raise ValueError(f"the mean {self.mean:g} must lie between min ({self.min}) and max ({self.max})")
        return self


class Prefixes(Part):
    """Prompts begin with one of `count` texts of `tokens` each; the k-th is drawn in proportion to k^-`zipf`."""

    count: Count
    tokens: Count
    zipf: Annotated[float, Field(ge=0, le=5, strict=False)] = 1.0


class WorkerGroup(Part):
    """`count` equal workers, called `name`-1 and so on.

    A worker runs `seats` choices together and some more of high priority; `speed` divides the time of each step.
    `costs` are measured figures (see `StepCosts`), or `costs_from` the files of `penstock bench engine --json`.
    """

    name: SubjectToken = "w"
    count: Count
    model: Annotated[str, Field(min_length=1)] = "m"
    seats: Annotated[int, Field(ge=1, le=4096)] = 16
    kv_tokens: Annotated[int, Field(ge=16)] = 65_536
    prefill_chunk: Count = 256
    context_length: Annotated[int, Field(ge=2)] = 8192
    speed: Above0 = 1.0
    costs: StepCosts | None = None
    costs_from: Annotated[tuple[str, ...], Field(strict=False)] = ()


class Tenant(Part):
    """A source of requests, `rate` a second: at random moments ("poisson"), or in equal steps ("even").

    From `begins` to `ends`, in seconds. Several may have the same `name`: they are one tenant's.
    """

    name: SubjectToken
    rate: Annotated[float, Field(ge=0, strict=False)]
    arrivals: Literal["poisson", "even"] = "poisson"
    priority: Priority = "normal"
    model: Annotated[str, Field(min_length=1)] = "m"
    prompt: Lengths = Lengths(mean=128)
    answer: Lengths = Lengths(mean=64)
    prefixes: Prefixes | None = None
    begins: Seconds = 0.0
    ends: Seconds | None = None
    timeout: Above0 | None = None


class Happening(Part):
    """What happens `at` a second: exactly one of the others.

    `kill` so many living workers at once, which come `back_after` so many seconds as new processes; `stop` some, which
    drain; `start` new ones; `slow` some by a `factor`, or `cut` some off from the broker, `lasts` seconds.
    `burst`: so many further requests of the tenant `of` come at once. Workers are drawn from those of `group`.
    """

    at: Seconds
    kill: Count | None = None
    stop: Count | None = None
    start: Count | None = None
    slow: Count | None = None
    cut: Count | None = None
    burst: Count | None = None
    of: str | None = None
    group: str | None = None
    back_after: Seconds | None = None
    factor: Above0 = 4.0
    lasts: Above0 = 10.0

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _is_one(self) -> Happening:
        named = [name for name in KINDS if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"name one of {', '.join(KINDS)}; it has {', '.join(named) or 'none of them'}")
        if (self.burst is None) != (self.of is None):
            raise ValueError("burst and of, the name of a tenant, go together")
        if self.back_after is not None and self.kill is None:
            raise ValueError("back_after goes with kill")
        return self


KINDS = ("kill", "stop", "start", "slow", "cut", "burst")


class Laws(Part):
    """What must hold, besides what always must: every request ends once, and its tokens come in order, each once.

    No request waits longer than `longest_wait` seconds for its first token. Of tenants with the same model and priority
    of whom something waits all through `fair_window` seconds, each gets at least the share `fair_share` of what the one
    with the most gets, by weighted tokens; 0 asks for nothing. Of a model's seats that workers report, no more than
    `idle_share` are free all through `idle_window` seconds in which at least as many requests wait for it as it has
    seats; 1 asks for nothing.
    """

    longest_wait: Above0 = 300.0
    idle_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.5
    idle_window: Above0 = 10.0
    fair_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.5
    fair_window: Above0 = 20.0


class Scenario(Part):
    """Ends when `jobs` requests have come, or after `seconds`, and all of them have ended.

    `settings` are those of the deployment, by their names in TOML.
    """

    jobs: Count | None = None
    seconds: Above0 | None = None
    seed: int = 0
    settings: dict[str, Any] = Field(default_factory=dict)
    workers: Annotated[tuple[WorkerGroup, ...], Field(strict=False)]
    tenants: Annotated[tuple[Tenant, ...], Field(strict=False)]
    events: Annotated[tuple[Happening, ...], Field(strict=False)] = ()
    laws: Laws = Laws()

    @property
    def deployment(self) -> Settings:
        return Settings(**self.settings)


class Loaded(NamedTuple):
    """A scenario with the costs of its groups of workers, in their order."""

    scenario: Scenario
    costs: tuple[StepCosts, ...]


def load_scenario(path: Path) -> Loaded:
    """Raises `ConfigurationError` with every fault of the file."""
    try:
        values = read_toml(path)
    except FileNotFoundError:
        raise ConfigurationError([f"{path}: no such file; name an existing one"]) from None
    return parse_scenario(values, path.parent)


def parse_scenario(values: Mapping[str, Any], directory: Path = Path()) -> Loaded:
    """As `load_scenario`; files of costs lie relative to `directory`."""
    faults: list[str] = []
    scenario: Scenario | None = None
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        faults += _texts("", error)
    costs: list[StepCosts] = []
    for number, group in enumerate(_tables(values, "workers")):
        names = group.get("costs_from", ())
        try:
            files = [directory / name for name in names] if isinstance(names, list) else []
            own = StepCosts.read(*files) if files else None
        except (ConfigurationError, TypeError) as error:
            faults += [f"workers.{number}.costs_from: {line}" for line in str(error).splitlines()]
            own = None
        given = scenario.workers[number].costs if scenario else None
        costs.append(own or given or BUNDLED_COSTS)
    faults += _crossing(values)
    if faults or scenario is None:
        raise ConfigurationError(faults)
    return Loaded(scenario, tuple(costs))


def _crossing(values: Mapping[str, Any]) -> Iterator[str]:
    """Faults between the parts of a scenario, however faulty the parts themselves."""
    if ("jobs" in values) == ("seconds" in values):
        yield "say how long it is: either jobs or seconds"
    groups, tenants = _tables(values, "workers"), _tables(values, "tenants")
    yield from (f"{name}: name at least one" for name in ("workers", "tenants") if values.get(name) == [])
    models = {group.get("model", "m") for group in groups}
    group_names = [group.get("name", "w") for group in groups]
    for name in sorted({str(name) for name in group_names if group_names.count(name) > 1}):
        yield f"workers: several groups are called {name!r}; give each a name"
    for number, group in enumerate(groups):
        if "costs" in group and "costs_from" in group:
            yield f"workers.{number}: either costs or costs_from"
    for number, tenant in enumerate(tenants):
        if (model := tenant.get("model", "m")) not in models:
            yield f"tenants.{number}.model: no worker serves {model!r}"
    names = {tenant.get("name") for tenant in tenants}
    for number, event in enumerate(_tables(values, "events")):
        if "of" in event and event["of"] not in names:
            yield f"events.{number}.of: there is no tenant {event['of']!r}"
        if "group" in event and event["group"] not in group_names:
            yield f"events.{number}.group: there are no workers called {event['group']!r}"
    if "jobs" in values and tenants and not any(tenant.get("rate") for tenant in tenants):
        yield "jobs: no tenant sends any"
    settings = values.get("settings", {})
    try:
        Settings(**settings if isinstance(settings, dict) else {})
    except ValidationError as error:
        yield from _texts("settings.", error)


def _tables(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = values.get(name, [])
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _texts(where: str, error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        place = where + ".".join(map(str, fault["loc"]))
        text = fault["msg"].removeprefix("Value error, ")
        yield f"{place}: {text[:1].lower()}{text[1:]}" if place else text
