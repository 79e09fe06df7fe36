"""The engine's public interface: prompts in; text, tokens or deltas out. Knows no broker and no HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self, overload

from ..schemas.bounds import whole
from ..schemas.events import Delta
from ..schemas.params import GenerationParams
from .adapters.files import read_adapter
from .adapters.loaded import Adapter, AdapterInfo, LoadedAdapters, Targets
from .backend import Backend, ProgressCallback
from .backends.registry import load_backend
from .blocking import wait_for
from .checks import check_parameters, check_supported, lacks
from .choice import Choice
from .config import EngineConfig
from .driver import Driver
from .grammar.matcher import GrammarCompiler
from .handle import RequestHandle, started
from .models import ModelInfo
from .output import Embedding, EngineStats, GenerationOutput, collected
from .planning.manifest import Manifest
from .plug_ins.found import PlugIns
from .plug_ins.port import PlugIn
from .pooled import inputs_of, pairs_of, refuse_pairs, results
from .preparing.prompts import Many, Prompt, Prompts, as_list, checked, is_list, naming, sight_of, tokens_of
from .progress import loading_bar
from .request import EngineRequest, check_ids
from .text.tokenizer_port import TokenizerLike

_log = logging.getLogger(__name__)


class InferenceEngine:
    """A loaded model and the thread that runs it.

    Use it as a context manager, or call `close`. Any thread may call any method, and any event loop the asynchronous
    ones. A request that fails while it runs ends with finish reason "error" and does not affect the others; one that
    can never be served raises `InvalidRequest` before anything runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: ProgressCallback | None = None,
        backend: Backend | None = None,
        plug_ins: Mapping[str, type[PlugIn]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        driver: type[Driver] = Driver,
    ) -> None:
        """Load the model that `config` names, which may take minutes.

        `progress` is called as the weights load, and a terminal shows a bar. `backend` replaces the configured one,
        `driver` its thread; `plug_ins` adds some. Raises `ConfigurationError`, `ModelLoadError`, `TypeError`.
        """
        self.config = checked(config, backend)
        self._plug_ins = PlugIns(config.allowed_plug_ins, plug_ins)
        if backend is not None:
            self._driver = driver(lambda: backend, config.stall_timeout)
        else:
            with loading_bar(f"loading {config.model}", progress) as report:
                self._driver = driver(partial(load_backend, config, report), config.stall_timeout)
        weakref.finalize(self, self._driver.close_soon).atexit = False  # as `close`, where nobody has it any more
        self._backend = self._driver.backend
        self.sight = sight_of(self._backend, config)
        self._prompts = Prompts(self._backend, self.sight)
        self._fallback: InferenceEngine | None = None
        if config.fallback_backend is not None:
            change = {"backend": config.fallback_backend, "fallback_backend": None, "prefix_cache_dir": None}
            own = config.model_copy(update=change)
            self._fallback = InferenceEngine(own, progress=progress, plug_ins=plug_ins, clock=clock)
        self._clock = clock
        self._grammars = GrammarCompiler(self._backend.tokenizer)
        self._adapters = LoadedAdapters()
        self._num_requests = self._num_prompt_tokens = 0

    @property
    def tokenizer(self) -> TokenizerLike:
        return self._backend.tokenizer

    @property
    def manifest(self) -> Manifest:
        """What the backend can do."""
        return self._backend.manifest

    @property
    def progress(self) -> int:
        """The number of steps so far; an engine that has running requests while this number stays the same hangs."""
        return self._driver.num_steps + (self._fallback.progress if self._fallback else 0)

    @property
    def healthy(self) -> bool:
        return self._driver.healthy and (self._fallback is None or self._fallback.healthy)

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the engine's thread, if any; then `healthy` is False and a new engine is needed."""
        return self._driver.error or (self._fallback.error if self._fallback else None)

    @property
    def image_mark(self) -> str:
        """The text that stands for an image in an `ImageText`. Raises `InvalidRequest` if the model sees none."""
        return self.sight.mark_of(self.tokenizer)

    def model_info(self) -> ModelInfo:
        return self._backend.info

    def stats(self) -> EngineStats:
        """Counts of both backends where there is a fallback; the cache is that of the first."""
        own = EngineStats(
            num_running=self._backend.num_running,
            num_waiting=self._backend.num_waiting,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._driver.num_tokens,
            num_steps=self._driver.num_steps,
            cache=self._backend.cache_stats(),
            adapter_memory=self._adapters.memory,
        )
        return own if self._fallback is None else own.plus(self._fallback.stats())

    def fallback_for(self, request: EngineRequest) -> str | None:
        """The fallback backend, if it runs such a request, because the first one lacks something that it has."""
        if self._fallback is None or not lacks(request, self._backend) or lacks(request, self._fallback._backend):
            return None
        return self._fallback.manifest.id

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(whole(text), add_special_tokens)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        check_ids(tokens := tokens_of(ids), "ids", self.tokenizer.vocabulary_size)
        return self.tokenizer.decode(tokens, skip_special_tokens)

    @overload
    def generate(
        self, prompts: Many, params: GenerationParams, adapter: str | None = None
    ) -> list[GenerationOutput]: ...
    @overload
    def generate(self, prompts: Prompt, params: GenerationParams, adapter: str | None = None) -> GenerationOutput: ...
    def generate(
        self, prompts: Prompt | Many, params: GenerationParams, adapter: str | None = None
    ) -> GenerationOutput | list[GenerationOutput]:
        """`agenerate`, but blocking."""
        outputs = wait_for(self._generate_all(as_list(prompts), params, adapter))
        return outputs if is_list(prompts) else outputs[0]

    @overload
    async def agenerate(
        self, prompts: Many, params: GenerationParams, adapter: str | None = None
    ) -> list[GenerationOutput]: ...
    @overload
    async def agenerate(
        self, prompts: Prompt, params: GenerationParams, adapter: str | None = None
    ) -> GenerationOutput: ...
    async def agenerate(
        self, prompts: Prompt | Many, params: GenerationParams, adapter: str | None = None
    ) -> GenerationOutput | list[GenerationOutput]:
        """Answer one prompt, or a list of them together; a prompt is text, token ids, or an `ImageText`.

        Cancelling the call cancels the requests. Raises `InvalidRequest` before any of them runs, `ModelNotFound` if
        no adapter of that name is loaded.
        """
        outputs = await self._generate_all(as_list(prompts), params, adapter)
        return outputs if is_list(prompts) else outputs[0]

    async def generate_stream(
        self, prompt: Prompt, params: GenerationParams, request_id: str | None = None, adapter: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one prompt as they arrive, all choices interleaved. Leaving early cancels the request.

        `request_id` is the id for `cancel`, by default a random one. Raises as `agenerate` does, at the first step.
        """
        request = await self._prompts.request(prompt, params, request_id, adapter)
        compiled = await self.prepare(request.params)
        handle = self.open(request)
        del compiled
        try:
            while not handle.finished:
                for delta in await handle.take():
                    yield delta
        finally:
            handle.cancel()

    async def prepare(self, params: GenerationParams) -> object:
        """Compile the grammar, if any, outside the event loop; unless its result is kept until `open`, that may compile
        it again, in the event loop. Raises `InvalidRequest`."""
        if params.grammar is None:
            return None
        if self._fallback is not None and self.fallback_for(EngineRequest("", (), params, seed=0)):
            return await self._fallback.prepare(params)
        check_parameters(params, self._backend)
        return await asyncio.to_thread(self._grammars.compile, params.grammar)

    def open(self, request: EngineRequest) -> RequestHandle:
        """Start a request with the caller's ids and seed; call it in the event loop that will read the handle.

        Raises `InvalidRequest` for a request that can never be served, `ModelNotFound` for an adapter that is not
        loaded, and `GenerationFailed` if the engine has stopped.
        """
        return self.open_all([request])[0]

    def open_all(self, requests: Sequence[EngineRequest]) -> list[RequestHandle]:
        """`open` for each, so that all are there before the next step; if one is refused, none runs."""
        starts = [self._prepared(request) for request in requests]
        with self._driver.together(requests):
            return started(starts)

    def _prepared(self, request: EngineRequest, instead: str | None = None) -> Callable[[], RequestHandle]:
        """What starts the request, with no long work left; `instead` names this backend if it is the fallback."""
        if self._fallback is not None and (fallback := self.fallback_for(request)):
            reason = lacks(request, self._backend)
            _log.warning("request %s runs on the fallback backend %s: %s", request.id, fallback, reason)
            return self._fallback._prepared(request, fallback)
        check_supported(request, self._backend)
        adapter, info = self._adapters.find(request.adapter), self._backend.info
        params, tokenizer, matcher, make = request.params, self.tokenizer, self._grammars.matcher, self._plug_ins.make
        own = enumerate((matcher(params), make(params, tokenizer, request.prompt)) for _ in range(params.n))
        choices = [Choice(request, index, tokenizer, info, grammar, adapter, more) for index, (grammar, more) in own]
        return partial(self._start, choices, instead)

    def _start(self, choices: list[Choice], instead: str | None) -> RequestHandle:
        request = choices[0].request
        handle = RequestHandle(request, lambda: self._driver.cancel_choices(choices), instead)  # which keeps the engine
        self._driver.submit(choices, handle)
        self._num_requests += 1
        self._num_prompt_tokens += len(request.prompt)
        return handle

    def embed(self, prompts: Sequence[Prompt], *, dimensions: int | None = None) -> list[Embedding]:
        """`aembed`, but blocking."""
        return wait_for(self.aembed(prompts, dimensions=dimensions))

    async def aembed(self, prompts: Sequence[Prompt], *, dimensions: int | None = None) -> list[Embedding]:
        """The vector of each prompt, text or token ids; `dimensions` shortens it and normalises it again.

        Raises `InvalidRequest` before anything runs, and `GenerationFailed`.
        """
        refuse_pairs(self._backend)
        inputs = inputs_of(map(self._prompts.ids, prompts), dimensions)
        found = await results(inputs, self._check, self.open_all)
        return [Embedding.of(text, len(one.prompt)) for text, one in zip(found, inputs, strict=True)]

    def score(self, query: str, documents: Sequence[str], *, max_tokens_per_doc: int | None = None) -> list[float]:
        """`ascore`, but blocking."""
        return wait_for(self.ascore(query, documents, max_tokens_per_doc=max_tokens_per_doc))

    async def ascore(
        self, query: str, documents: Sequence[str], *, max_tokens_per_doc: int | None = None
    ) -> list[float]:
        """How relevant each document is to the query: the more, the higher, for most rerankers from 0 to 1.

        A query and a document that are longer than the context together are refused, unless `max_tokens_per_doc` has
        documents cut to so many tokens. Raises `InvalidRequest` before anything runs, and `GenerationFailed`.
        """
        inputs = await asyncio.to_thread(pairs_of, self._backend, query, documents, max_tokens_per_doc)
        return list(map(float, await results(inputs, self._check, self.open_all)))

    def save_prefixes(self, path: str | Path) -> int:
        """Write the cached prefixes to a file, between two steps; returns the number of blocks of tokens.

        Raises `InvalidRequest` for a backend without a prefix cache, and `OSError`.
        """
        return self._driver.call(lambda: self._backend.save_prefixes(Path(path).expanduser())).result()

    def load_prefixes(self, path: str | Path) -> int:
        """Restore the prefixes that `save_prefixes` wrote for the same model, as far as they fit.

        Returns the number of blocks. Raises `ConfigurationError` for a file of another model.
        """
        return self._driver.call(lambda: self._backend.load_prefixes(Path(path).expanduser())).result()

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        """Load a LoRA adapter, a directory in PEFT's format, for requests that name it; running ones go on meanwhile.

        If the name is taken, later requests get the new adapter, and earlier ones finish with the old. Raises
        `InvalidRequest` for one that does not fit the model, or for which there is no room; then nothing changes.
        """
        targets: Targets = self._driver.call(self._backend.adapter_targets).result()
        files = read_adapter(name, Path(path).expanduser(), targets)
        adapter: Adapter = self._driver.call(partial(self._backend.load_adapter, files)).result()
        if self._fallback is not None and self._fallback.manifest.adapters:
            self._fallback.load_adapter(name, path)
        self._adapters.add(adapter)
        return adapter.info

    def unload_adapter(self, name: str) -> None:
        """Refuse later requests that name the adapter; its memory is freed when the last earlier one has ended.

        Raises `ModelNotFound` if no adapter has the name.
        """
        self._adapters.remove(name)
        if self._fallback is not None and self._fallback.manifest.adapters:
            self._fallback.unload_adapter(name)

    def adapters(self) -> list[AdapterInfo]:
        """The loaded adapters, by name."""
        return self._adapters.infos()

    def cancel(self, request_id: str) -> bool:
        """Stop a request before its next token. Returns whether it was running."""
        is_other = self._fallback is not None and self._fallback.cancel(request_id)
        return self._driver.cancel(request_id) or is_other

    def close(self, timeout: float | None = None) -> bool:
        """Stop the engine; running requests end with finish reason "cancelled".

        Returns whether it stopped within `timeout` seconds.
        """
        ended = self._driver.close(timeout)
        return (self._fallback is None or self._fallback.close(timeout)) and ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _generate_all(
        self, prompts: list[Prompt], params: GenerationParams, adapter: str | None
    ) -> list[GenerationOutput]:
        requests = []
        for index, prompt in enumerate(prompts):
            with naming(index, len(prompts)):
                requests.append(await self._prompts.request(prompt, params, adapter=adapter))
                self._check(requests[-1])
        compiled = await self.prepare(params)
        handles = self.open_all(requests)
        del compiled
        try:
            return list(await asyncio.gather(*[collected(one, self.tokenizer, self._clock) for one in handles]))
        finally:
            for handle in handles:
                handle.cancel()

    def _check(self, request: EngineRequest) -> None:
        if self._fallback is not None and self.fallback_for(request):
            return self._fallback._check(request)
        check_supported(request, self._backend)
        self._plug_ins.check(request.params, self.tokenizer, request.prompt)
        self._adapters.find(request.adapter)
