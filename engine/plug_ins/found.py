"""Finds generation plug-ins among installed packages, and makes those that a request names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from ...schemas.errors import GenerationFailed, InvalidRequest
from ...schemas.params import GenerationParams, PlugInUse
from ..planning.discovery import installed, package_of
from ..planning.manifest import explain
from ..text.tokenizer_port import TokenizerLike
from .port import INTERFACE, CleanUp, Context, LogitsProcessor, PlugIn, StoppingCriterion
from .running import ChoicePlugIns

GROUP = "penstock.generation"
KINDS: Mapping[str, type[PlugIn]] = {  # by the parameter that names them
    "logits_processors": LogitsProcessor,
    "stopping_criteria": StoppingCriterion,
    "clean_ups": CleanUp,
}
_WORDS = {"logits_processors": "logits processor", "stopping_criteria": "stopping criterion", "clean_ups": "clean-up"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundPlugIn:
    """A generation plug-in: its name, the package that it comes from, and its class, or why it cannot be used."""

    name: str
    package: str
    made_by: type[PlugIn] | None
    fault: str = ""

    @property
    def param(self) -> str:
        """The parameter of requests that names plug-ins of its kind; empty if it cannot be used."""
        return next((param for param, kind in KINDS.items() if self.made_by and issubclass(self.made_by, kind)), "")

    @property
    def arguments(self) -> str:
        """What its arguments are called, as in its source; empty if it cannot be used."""
        if self.made_by is None:
            return ""
        return ", ".join(str(each) for each in _parameters(self.made_by))


def find_plug_ins(allowed: Collection[str] | None = None) -> list[FoundPlugIn]:
    """The installed generation plug-ins by name. One that cannot be used does not affect the others.

    `allowed` are the names of those that may be imported; None allows all.
    """
    return [_found(name, entries, allowed) for name, entries in installed(GROUP).items()]


class PlugIns:
    """The generation plug-ins that requests may name: `given` ones, and the installed ones that are `allowed`."""

    def __init__(self, allowed: Collection[str] | None = None, given: Mapping[str, type[PlugIn]] | None = None) -> None:
        """None allows all that are installed. Raises `TypeError` for what is no plug-in."""
        self._allowed = None if allowed is None else frozenset(allowed)
        if not isinstance(given or {}, Mapping):
            raise TypeError(f"plug_ins must map names to classes, not be a {type(given).__name__}")
        self._known = {name: FoundPlugIn(name, "", _given(name, each)) for name, each in (given or {}).items()}

    def check(self, params: GenerationParams, tokenizer: TokenizerLike, prompt: Sequence[int]) -> None:
        """Raise `InvalidRequest` for unknown names and for arguments that a plug-in does not take, and
        `GenerationFailed`, which names it, for one that fails."""
        self.make(params, tokenizer, prompt)

    def make(self, params: GenerationParams, tokenizer: TokenizerLike, prompt: Sequence[int]) -> ChoicePlugIns | None:
        """New instances for one choice, None if the request names none. Raises as `check` does."""
        if not params.plug_ins:
            return None
        context = Context(tokenizer, tuple(prompt))
        return ChoicePlugIns(
            self._made("logits_processors", params.logits_processors, context),
            self._made("stopping_criteria", params.stopping_criteria, context),
            self._made("clean_ups", params.clean_ups, context),
        )

    def _made(self, param: str, uses: Sequence[PlugInUse], context: Context) -> list[tuple[str, Any]]:
        return [(use.name, self._instance(param, use, context)) for use in uses]

    def _instance(self, param: str, use: PlugInUse, context: Context) -> PlugIn:
        found, word = self._find(use.name), _WORDS[param]
        if found is None or (found.made_by is not None and found.param != param):
            known = [name for name in self._names() if (other := self._find(name)) and other.param == param]
            raise InvalidRequest(
                f"There is no {word} {use.name!r} for requests here; known: {', '.join(known) or 'none'}.",
                code="unknown_plug_in",
                param=param,
            )
        if found.made_by is None:
            raise InvalidRequest(
                f"The {word} {use.name!r} of {found.package} cannot be used: {found.fault}.",
                code="unusable_plug_in",
                param=param,
            )
        try:
            _check_arguments(found.made_by, use.arguments)
            return found.made_by(context, **use.arguments)
        except ValueError as error:
            raise InvalidRequest(
                f"The {word} {use.name!r} does not take these arguments: {error}.",
                code="invalid_plug_in_arguments",
                param=param,
            ) from None
        except Exception as error:
            _log.warning("%s %r cannot be made", word, use.name, exc_info=error)
            raise GenerationFailed(
                f"The {word} {use.name!r} failed on this request ({type(error).__name__}); leave it out, or have it "
                "mended."
            ) from error

    def _names(self) -> list[str]:
        return sorted({*self._known, *(self._allowed if self._allowed is not None else installed(GROUP))})

    def _find(self, name: str) -> FoundPlugIn | None:
        """One that was found stays; the others may yet be installed."""
        if name in self._known:
            return self._known[name]
        if self._allowed is not None and name not in self._allowed:
            return None
        if (entries := installed(GROUP).get(name)) is None:
            return None
        found = self._known[name] = _found(name, entries, None)
        return found


def read_plug_in(found: object) -> type[PlugIn]:
    """The class to which an entry point leads. Raises `ValueError`, which says what is wrong with it."""
    if not isinstance(found, type) or not issubclass(found, PlugIn) or not issubclass(found, tuple(KINDS.values())):
        name = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ValueError(f"{name} derives from none of LogitsProcessor, StoppingCriterion and CleanUp")
    version = getattr(found, "interface", None)
    if version != INTERFACE:
        raise ValueError(
            f"it was written for interface {version!r} of generation plug-ins, and this Penstock has {INTERFACE}; "
            "install a release of it for this one"
        )
    lacking: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
    if lacking:
        raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    return found


def _given(name: str, found: object) -> type[PlugIn]:
    try:
        return read_plug_in(found)
    except ValueError as error:
        raise TypeError(f"plug_ins[{name!r}]: {error}") from None


def _found(name: str, entries: list[EntryPoint], allowed: Collection[str] | None) -> FoundPlugIn:
    packages = sorted(map(package_of, entries))
    if len(entries) > 1:
        return FoundPlugIn(name, packages[0], None, f"{' and '.join(packages)} both have it; uninstall one of them")
    if allowed is not None and name not in allowed:
        return FoundPlugIn(name, packages[0], None, "allowed_plug_ins does not list it")
    try:
        return FoundPlugIn(name, packages[0], read_plug_in(entries[0].load()))
    except (Exception, SystemExit) as error:  # whatever a plug-in does must not end the others
        return FoundPlugIn(name, packages[0], None, explain(error))


def _parameters(made_by: type[PlugIn]) -> list[inspect.Parameter]:
    """Those of its arguments: what comes after the context."""
    return list(inspect.signature(made_by).parameters.values())[1:]


def _check_arguments(made_by: type[PlugIn], arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the class takes these arguments, as far as their names tell."""
    try:
        inspect.signature(made_by).bind(None, **arguments)
    except TypeError as error:
        takes = ", ".join(str(each) for each in _parameters(made_by)) or "none"
        raise ValueError(f"{error} (it takes: {takes})") from None
