"""The engine around a backend: requests in from event loops, deltas out, whatever happens in its thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import (
    EngineConfig,
    EngineRequest,
    GenerationParams,
    InferenceEngine,
)
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.handle import merge
from penstock.engine.planning.manifests import ECHO
from penstock.schemas.errors import GenerationFailed, InvalidRequest
from penstock.schemas.events import Delta

CONFIG = EngineConfig(model="echo", backend="echo")
ENDLESS = GenerationParams(ignore_eos=True, max_tokens=100_000)


class Gated(EchoBackend):
    """Steps only as often as it is allowed to, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.allowed = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self._entered = threading.Semaphore(0)

    async def entered(self, times: int = 1) -> None:
        """Wait until so many more steps have begun: then those before them have been delivered."""
        for _ in range(times):
            await asyncio.to_thread(self._entered.acquire)

    def step(self) -> list[Delta]:
        self._entered.release()
        self.allowed.acquire()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().step()


def request(name: str = "r", text: str = "abc", params: GenerationParams = ENDLESS, **rest: Any) -> EngineRequest:
    return EngineRequest(name, tuple(text.encode()), params, seed=1, **rest)


async def read_all(engine: InferenceEngine, wanted: EngineRequest) -> list[Delta]:
    handle = engine.open(wanted)
    deltas: list[Delta] = []
    while not handle.finished:
        deltas += await handle.take()
    return merge(deltas)


def test_a_list_of_prompts_gives_a_list(echo: InferenceEngine) -> None:
    assert [output.text for output in echo.generate(["a", "bc"], GenerationParams())] == ["a", "bc"]
    assert [output.text for output in echo.generate([[97], [98, 99]], GenerationParams())] == ["a", "bc"]
    assert echo.generate([97, 98], GenerationParams()).text == "ab"
    assert echo.generate([*np.array([97, 98])], GenerationParams()).text == "ab"
    rows: list[Any] = [*np.array([[97, 98], [98, 99]])]
    assert [output.text for output in echo.generate(rows, GenerationParams())] == ["ab", "bc"]
    assert echo.generate([], GenerationParams()) == []


@pytest.mark.parametrize(
    ("prompt", "params", "fault"),
    [
        ([{"role": "user", "content": "Hi"}], GenerationParams(), r"not dict; make one of messages by .*encode_chat"),
        ({"role": "user"}, GenerationParams(), "a prompt must be text, token ids or an ImageText, not dict"),
        ([[1, 2.5]], GenerationParams(), "not list of float and int"),
        (b"Hi", GenerationParams(), "not bytes"),
        (bytearray(b"Hi"), GenerationParams(), "not bytearray"),
        ({97, 98}, GenerationParams(), "not set"),
        (None, GenerationParams(), "not NoneType"),
        ("Hi", {"max_tokens": 1}, r"params must be GenerationParams, not dict; write GenerationParams\(max_tokens"),
    ],
)
async def test_what_is_no_prompt_is_refused_in_words(
    echo: InferenceEngine, prompt: Any, params: Any, fault: str
) -> None:
    with pytest.raises(TypeError, match=fault):
        await echo.agenerate(prompt, params)
    with pytest.raises(TypeError, match=fault):
        await anext(echo.generate_stream(prompt[0] if isinstance(prompt, list) else prompt, params))


def test_half_a_character_is_the_replacement_character(echo: InferenceEngine) -> None:
    params = GenerationParams(max_tokens=8)
    cut, other = echo.generate(["a \ud83d b", "a \ufffd b"], params)
    assert cut.token_ids == other.token_ids
    assert echo.tokenize("a \ud83d b") == echo.tokenize("a \ufffd b")


@pytest.mark.parametrize("outside", [-1, 10**6])
def test_tokens_that_do_not_exist_have_no_text(echo: InferenceEngine, outside: int) -> None:
    with pytest.raises(InvalidRequest, match=f"ids: token id {outside} is outside the vocabulary of "):
        echo.detokenize([72, outside])
    array: Any = np.array([72, 105])
    assert echo.detokenize(array) == "Hi"
    once: Any = iter([72, 105])
    assert echo.detokenize(once) == "Hi"


@pytest.mark.parametrize("ids", [None, "72", b"Hi", [72.0], [[72]]])
def test_what_is_no_token_has_no_text(echo: InferenceEngine, ids: Any) -> None:
    with pytest.raises(TypeError, match="ids must be token ids, not "):
        echo.detokenize(ids)


def test_the_name_of_a_model_is_no_configuration() -> None:
    with pytest.raises(TypeError, match=r"config must be EngineConfig, not str; write EngineConfig\(model="):
        InferenceEngine("penstock-nano")  # type: ignore[arg-type]


def test_the_name_of_a_backend_is_no_backend() -> None:
    with pytest.raises(TypeError, match=r"backend must be a loaded Backend, not str; write EngineConfig\(backend="):
        InferenceEngine(CONFIG, backend="echo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plug_ins", "message"),
    [(["brief"], "must map names to classes, not be a list"), ({"a": int}, "'a'.: int derives")],
)
def test_what_is_no_plug_in_is_refused_before_a_model_loads(plug_ins: Any, message: str) -> None:
    missing = EngineConfig(model="/nowhere")  # which to load would raise another error
    with pytest.raises(TypeError, match=message):
        InferenceEngine(missing, plug_ins=plug_ins)


async def test_generate_works_inside_a_running_loop(echo: InferenceEngine) -> None:
    assert echo.generate("here", GenerationParams()).text == "here"


def test_statistics_of_an_answer() -> None:
    seconds = iter(range(100))
    with InferenceEngine(CONFIG, backend=Gated(), clock=lambda: float(next(seconds))) as engine:
        assert isinstance(engine._backend, Gated)
        engine._backend.allowed.release(10)
        output = engine.generate("ab", GenerationParams(n=2))
    stats = output.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (2, 0, 6)
    assert stats.time_to_first_token == 1.0
    assert stats.total_time >= 2.0
    assert stats.tokens_per_second == 6 / stats.total_time


def test_loading_reports_its_progress(model_directory: Callable[[str], Path]) -> None:
    seen: list[tuple[int, int]] = []
    config = EngineConfig(model=str(model_directory("llama")), device="cpu")
    InferenceEngine(config, progress=lambda done, total: seen.append((done, total))).close()
    total = len(seen)
    assert seen == [(done, total) for done in range(1, total + 1)] and total > 10


def test_statistics_of_the_engine(echo: InferenceEngine) -> None:
    echo.generate(["ab", "c"], GenerationParams(n=2))
    stats = echo.stats()
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_generated_tokens) == (2, 3, 10)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_steps == echo.progress > 0


async def test_a_slow_reader_gets_fewer_larger_deltas() -> None:
    backend = Gated()
    with InferenceEngine(CONFIG, backend=backend) as engine:
        engine.open(request("other"))
        await backend.entered()
        slow = engine.open(request("slow", "abc", GenerationParams(n=2, max_tokens=3)))
        backend.allowed.release(4)
        await backend.entered(4)
        deltas = await slow.take()
        assert [(delta.choice, delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
            (0, 0, "abc", "length"),
            (1, 0, "abc", "length"),
        ]
        assert slow.finished and await slow.take() == []
        backend.allowed.release()


async def test_cancel_ends_every_choice_and_spares_the_others(echo: InferenceEngine) -> None:
    handle = echo.open(request("one", params=GenerationParams(n=2, ignore_eos=True, max_tokens=100_000)))
    other = asyncio.create_task(read_all(echo, request("other", "xyz", GenerationParams(min_tokens=50))))
    await handle.take()
    assert echo.cancel("one")
    deltas: list[Delta] = []
    while not handle.finished:
        deltas += await handle.take()
    assert [delta.finish_reason for delta in merge(deltas)] == ["cancelled", "cancelled"]
    assert not echo.cancel("one")
    assert (await other)[0].text == ("xyz" * 17)[:50]


async def test_leaving_a_stream_early_cancels(echo: InferenceEngine) -> None:
    stream = echo.generate_stream("abc", ENDLESS, request_id="left")
    assert (await anext(stream)).text
    await stream.aclose()
    await read_all(echo, request("after", params=GenerationParams()))
    assert echo.stats().num_running == 0


async def test_cancelling_the_call_cancels_the_request() -> None:
    backend = Gated()
    with InferenceEngine(CONFIG, backend=backend) as engine:
        call = asyncio.create_task(engine.agenerate("abc", ENDLESS))
        await backend.entered()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        backend.allowed.release(10)
        await read_all(engine, request("after", params=GenerationParams()))
        assert engine.stats().num_running == 0


async def test_a_reader_whose_loop_is_gone_is_cancelled() -> None:
    backend = Gated()
    with InferenceEngine(CONFIG, backend=backend) as engine:

        async def abandon() -> None:
            engine.open(request("orphan"))

        await asyncio.to_thread(asyncio.run, abandon())
        await backend.entered()
        backend.allowed.release(10)
        await read_all(engine, request("after", params=GenerationParams()))
        assert engine.stats().num_running == 0


async def test_several_prompts_may_share_a_request_id(echo: InferenceEngine) -> None:
    first, second = await asyncio.gather(
        read_all(echo, request("shared", "ab", GenerationParams(n=2))),
        read_all(echo, request("shared", "cd", GenerationParams(), first_choice=2)),
    )
    assert [(delta.choice, delta.text) for delta in first + second] == [(0, "ab"), (1, "ab"), (2, "cd")]


async def test_the_same_choice_is_refused_while_it_runs(echo: InferenceEngine) -> None:
    handle = echo.open(request("same"))
    with pytest.raises(InvalidRequest, match="'same' already runs"):
        echo.open(request("same"))
    handle.cancel()


async def test_where_one_of_several_is_refused_none_runs(echo: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="'one' already runs"):
        echo.open_all([request("one"), request("two"), request("one")])
    deltas = [await read_all(echo, request(name, "ab", GenerationParams())) for name in ("one", "two")]
    assert ["".join(delta.text for delta in each) for each in deltas] == ["ab", "ab"]


async def test_a_choice_that_had_finished_ends_at_once(echo: InferenceEngine) -> None:
    done = request("done", "ab", GenerationParams(n=2), epoch=2, generated=((97, 98, 256), (97,)))
    first, second = sorted(await read_all(echo, done), key=lambda delta: delta.choice)
    assert (first.index, first.token_ids, first.finish_reason) == (3, (), "stop")
    assert (second.index, second.token_ids, second.text) == (1, (98, 256), "b")


async def test_a_failed_step_ends_what_it_touched_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    backend = Gated()
    with InferenceEngine(CONFIG, backend=backend) as engine:
        backend.failure = RuntimeError("broken")
        touched = engine.open(request("touched"))
        await backend.entered()
        untouched = engine.open(request("untouched", "ab", GenerationParams()))
        backend.allowed.release(10)
        (delta,) = await touched.take()
        assert delta.finish_reason == "error"
        assert delta.error is not None and (delta.error.status, delta.error.code) == (500, "generation_failed")
        while not untouched.finished:
            assert all(delta.error is None for delta in await untouched.take())
        assert engine.healthy and engine.error is None


async def test_a_dead_thread_ends_everything_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    backend = Gated()
    engine = InferenceEngine(CONFIG, backend=backend)
    backend.failure = SystemExit("gone")
    handle = engine.open(request())
    backend.allowed.release()
    (delta,) = await handle.take()
    assert delta.finish_reason == "error"
    assert engine.close(timeout=10)
    assert not engine.healthy and isinstance(engine.error, SystemExit)
    with pytest.raises(GenerationFailed, match="the engine has stopped"):
        engine.open(request())


async def test_closing_cancels_what_runs() -> None:
    engine = InferenceEngine(CONFIG)
    handle = engine.open(request())
    await handle.take()
    assert engine.close(timeout=10)
    deltas: list[Delta] = []
    while not handle.finished:
        deltas += await handle.take()
    assert deltas[-1].finish_reason == "cancelled"
    with pytest.raises(GenerationFailed, match="the engine has stopped"):
        engine.generate("abc", GenerationParams())


async def test_an_engine_that_nobody_has_any_more_ends() -> None:
    """A notebook's cell that makes an engine is run again and again, and each has the memory of a model."""

    class Watched(EchoBackend):
        closed = threading.Event()

        def close(self) -> None:
            self.closed.set()

    engine = InferenceEngine(CONFIG, backend=Watched(CONFIG))
    handle = engine.open(request())
    del engine
    gc.collect()
    deltas: list[Delta] = []
    while not handle.finished:
        deltas += await handle.take()
    assert deltas[-1].finish_reason != "cancelled"  # a request that runs keeps its engine
    del handle
    gc.collect()
    assert await asyncio.to_thread(Watched.closed.wait, 10)


async def test_closing_gives_up_after_its_time() -> None:
    backend = Gated()
    engine = InferenceEngine(CONFIG, backend=backend)
    handle = engine.open(request())
    await backend.entered()
    assert not engine.close(timeout=0)
    backend.allowed.release()
    assert engine.close(timeout=10)
    assert (await handle.take())[-1].finish_reason == "cancelled"


def test_what_the_backend_lacks_is_refused() -> None:
    class Simple(EchoBackend):
        manifest = ECHO.model_copy(update={"parameters": frozenset({"max_tokens", "temperature"})})

    with InferenceEngine(CONFIG, backend=Simple(CONFIG)) as engine:
        assert engine.generate("a", GenerationParams(max_tokens=5, top_p=1.0)).text == "a"
        with pytest.raises(InvalidRequest, match="does not support top_p"):
            engine.generate("a", GenerationParams(top_p=0.5))
        with pytest.raises(InvalidRequest, match="cannot embed"):
            engine.embed(["a"])
