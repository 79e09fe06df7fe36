"""A cache of greedy answers: an identical request with temperature 0 gets the tokens without running the model.

It wraps a backend and is one. Tenants share neither answers nor prefixes.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from ...schemas.events import Delta
from ..adapters.files import AdapterFiles
from ..adapters.loaded import Adapter, Targets
from ..backend import Backend
from ..choice import Choice
from ..cpu.machine import memory_of_machine
from ..models import ModelInfo
from ..output import CacheStats
from ..planning.manifest import Manifest
from ..text.tokenizer_port import TokenizerLike

_SHARE_OF_RAM = 0.05
_ENTRY_BYTES = 300  # of an entry without its tokens: key, list, dictionary slots
_TOKEN_BYTES = 40  # of a token: the list's reference and the integer


class AnswerCache:
    """Evicts the least recently used answers beyond `memory` bytes, by default a twentieth of the machine's or the
    container's."""

    def __init__(self, backend: Backend, memory: int | None = None) -> None:
        self._backend = backend
        self._memory = int(memory_of_machine().total * _SHARE_OF_RAM) if memory is None else memory
        self._used = 0
        self._answers: OrderedDict[bytes, list[int]] = OrderedDict()
        self._replays: dict[Choice, list[int]] = {}
        self._recording: dict[Choice, bytes] = {}

    @property
    def manifest(self) -> Manifest:
        return self._backend.manifest

    @property
    def info(self) -> ModelInfo:
        return self._backend.info

    @property
    def tokenizer(self) -> TokenizerLike:
        return self._backend.tokenizer

    @property
    def num_running(self) -> int:
        return self._backend.num_running + len(self._replays)

    @property
    def num_waiting(self) -> int:
        return self._backend.num_waiting

    def add(self, choice: Choice) -> None:
        key = _key(choice)
        if key is not None and key in self._answers:
            self._answers.move_to_end(key)
            self._replays[choice] = self._answers[key]
            choice.cached_tokens = len(choice.prompt)
            return
        self._backend.add(choice)
        if key is not None:
            self._recording[choice] = key

    def remove(self, choice: Choice) -> None:
        self._replays.pop(choice, None)
        self._recording.pop(choice, None)
        self._backend.remove(choice)

    def step(self) -> list[Delta]:
        deltas = []
        replays, self._replays = self._replays, {}
        for choice, tokens in replays.items():
            for token in tokens[choice.index :]:
                if (delta := choice.append(token)) is not None:
                    deltas.append(delta)
        if self._backend.delay() <= 0:
            deltas += self._backend.step()
            for choice in [choice for choice in self._recording if choice.finish is not None]:
                self._store(self._recording.pop(choice), choice)
        return deltas

    def delay(self) -> float:
        return 0.0 if self._replays else self._backend.delay()

    def cache_stats(self) -> CacheStats | None:
        return self._backend.cache_stats()

    def save_prefixes(self, path: Path) -> int:
        return self._backend.save_prefixes(path)

    def load_prefixes(self, path: Path) -> int:
        return self._backend.load_prefixes(path)

    def adapter_targets(self) -> Targets:
        return self._backend.adapter_targets()

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        return self._backend.load_adapter(files)

    def close(self) -> None:
        self._answers.clear()
        self._backend.close()

    def _store(self, key: bytes, choice: Choice) -> None:
        if choice.finish in ("error", "cancelled") or key in self._answers:
            return
        self._answers[key] = list(choice.tokens)
        self._used += _size(choice.tokens)
        while self._used > self._memory:
            _, oldest = self._answers.popitem(last=False)
            self._used -= _size(oldest)


def _size(tokens: list[int]) -> int:
    return _ENTRY_BYTES + _TOKEN_BYTES * len(tokens)


def _key(choice: Choice) -> bytes | None:
    """A hash of all that determines the answer; None for a sampled one, or one with log-probabilities."""
    params = choice.request.params
    if params.temperature > 0 or params.logprobs is not None:
        return None
    asked = params.model_dump_json(exclude={"seed", "n"})
    prompt = struct.pack(f"<{len(choice.prompt)}q", *choice.prompt)
    salt = choice.request.cache_salt.encode()
    adapter = choice.adapter.info.digest.encode() if choice.adapter is not None else b""
    images = b"".join(image.identity + struct.pack("<q", image.offset) for image in choice.request.images)
    content = struct.pack("<qq", len(salt), len(images)) + salt + images + prompt + asked.encode()
    return blake2b(content, digest_size=16, key=adapter).digest()
