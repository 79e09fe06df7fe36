"""The engine in somebody else's program: Ctrl-C, forks, the interpreter's end, and what the program has changed."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.checkpoints.files import read_header, read_json
from penstock.engine.progress import loading_bar
from penstock.engine.text.byte_tokenizer import ByteTokenizer
from penstock.schemas.errors import GenerationFailed, InvalidRequest, ModelLoadError

CONFIG = EngineConfig(model="echo", backend="echo")
SHORT = GenerationParams(max_tokens=3)
HEAD = """
import asyncio, os, signal, sys, threading
from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.driver import Driver

CONFIG = EngineConfig(model="echo", backend="echo")
ENDLESS = GenerationParams(ignore_eos=True, max_tokens=1_000_000_000)


class Loud(EchoBackend):
    closed = threading.Event()
    stepped = threading.Event()

    def step(self):
        self.stepped.set()
        return super().step()

    def close(self):
        print("closed", flush=True)
        self.closed.set()
"""


def printed(script: str) -> str:
    """What a program prints that begins with `HEAD` and ends well."""
    done = subprocess.run([sys.executable, "-c", HEAD + script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_end_of_the_interpreter_waits_for_a_step() -> None:
    """A thread that is in the middle of one when it is taken away makes torch abort the process."""
    script = """
engine = InferenceEngine(CONFIG, backend=Loud(CONFIG))
threading.Thread(target=lambda: engine.generate("abc", ENDLESS), daemon=True).start()
Loud.stepped.wait()
print("over", flush=True)
"""
    assert printed(script) == "over\nclosed\n"


def test_the_end_of_the_interpreter_waits_until_a_dropped_engine_is_freed() -> None:
    """Its own thread frees the model then; torch makes a thread that is taken away in there abort the process."""
    script = """
import atexit
frees, ends = threading.Event(), threading.Event()


class Large(EchoBackend):
    def __del__(self):
        frees.set()
        ends.wait()
        print("freed", sum(range(3_000_000)) > 0, flush=True)


def use():
    engine = InferenceEngine(CONFIG, backend=Large(CONFIG))
    atexit.register(ends.set)
    print(engine.generate("abc", GenerationParams(max_tokens=3)).text)


atexit.register(print, "over", flush=True)
use()
frees.wait()
"""
    assert printed(script) == "abc\nfreed True\nover\n"


def test_nothing_is_kept_for_the_end_of_the_interpreter_of_an_engine_that_is_closed_or_gone() -> None:
    script = """
import gc, weakref


def seen():
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "penstock-engine"]
    return weakref.ref(thread)


for is_closed in (True, False):
    engine = InferenceEngine(CONFIG, backend=EchoBackend(CONFIG))
    thread = seen()
    if is_closed:
        engine.close()
    del engine
    if thread():
        thread().join()
    gc.collect()
    print(thread())
"""
    assert printed(script) == "None\nNone\n"


def test_the_end_of_the_interpreter_waits_until_dropped_keys_and_values_are_freed() -> None:
    """The thread that allocates their memory may be the last one that holds them."""
    script = """
import atexit
import torch
from penstock.engine.paged.kv.kv_cache import Pool, populated


class Large(Pool):
    def __del__(self):
        print("freed", sum(range(3_000_000)) > 0, flush=True)


atexit.register(print, "over", flush=True)


def load():
    populated([Large(torch.zeros(1, 1 << 26, dtype=torch.uint8), axis=1)])


loader = threading.Thread(target=load, daemon=True)  # as an engine's
loader.start()
loader.join()
"""
    assert printed(script) == "freed True\nover\n"


def test_ctrl_c_while_a_model_loads_frees_it() -> None:
    script = """
interrupted = threading.Event()


def load():
    os.kill(os.getpid(), signal.SIGINT)
    interrupted.wait()
    return Loud(CONFIG)


try:
    Driver(load, 30.0)
except KeyboardInterrupt:
    interrupted.set()
    print(Loud.closed.wait(30))
"""
    assert printed(script) == "closed\nTrue\n"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_ctrl_c_stops_a_call_in_a_notebook(elsewhere: bool) -> None:
    """Its thread runs an event loop, so the call waits for another thread, which may be the one to get the signal."""
    script = (
        f"ELSEWHERE = {elsewhere}"
        + """
class Impatient(EchoBackend):
    # Interrupts the first request, and goes on when it is cancelled.

    is_interrupted, is_cancelled = False, threading.Event()

    def step(self):
        if not self.is_interrupted:
            self.is_interrupted = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().step() if self.is_cancelled.is_set() else []

    def remove(self, choice):
        self.is_cancelled.set()
        super().remove(choice)


async def cell():
    with InferenceEngine(CONFIG, backend=Impatient(CONFIG)) as engine:
        if ELSEWHERE:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            engine.generate("abc", ENDLESS)
        except KeyboardInterrupt:
            print("interrupted", engine.generate("abc", GenerationParams(max_tokens=3)).text)


asyncio.new_event_loop().run_until_complete(cell())
"""
    )
    assert printed(script) == "interrupted abc\n"


def test_a_forked_process_has_no_engine_and_hears_so() -> None:
    """Whoever held a lock at the fork, the engine's own thread perhaps, does not release it in the child."""
    script = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, since Python 3.12
engine = InferenceEngine(CONFIG)
holds, may_go = threading.Event(), threading.Event()


def hold():
    with engine._driver._changed:
        holds.set()
        may_go.wait()


threading.Thread(target=hold, daemon=True).start()
holds.wait()
child = os.fork()
if child == 0:
    for use in (lambda: engine.generate("abc", ENDLESS), lambda: engine.save_prefixes("x")):
        try:
            use()
        except Exception as error:
            print(error, flush=True)
    print(engine.cancel("r"), engine.close(), flush=True)
    sys.exit()
os.waitpid(child, 0)
may_go.set()
print(engine.generate("abc", GenerationParams(max_tokens=3)).text)
"""
    refused = "a forked process does not have its parent's engine; load one there, after the fork\n"
    assert printed(script) == f"{refused}{refused}False True\nabc\n"


def test_a_directory_that_is_gone_is_no_place_for_an_engine() -> None:
    script = """
import tempfile
gone = tempfile.mkdtemp()
os.chdir(gone)
os.rmdir(gone)
try:
    InferenceEngine(CONFIG)
except Exception as error:
    print(type(error).__name__, error)
"""
    what = "ConfigurationError the current directory cannot be used (No such file or directory); go to another"
    assert printed(script) == f"{what}\n"


def test_a_blocking_call_leaves_the_event_loop_of_its_thread() -> None:
    before = asyncio.new_event_loop()
    asyncio.set_event_loop(before)
    try:
        with InferenceEngine(CONFIG) as engine:
            engine.generate("abc", SHORT)
        assert asyncio.get_event_loop() is before
    finally:
        asyncio.set_event_loop(None)
        before.close()


def test_a_program_without_standard_error_loads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw, and in daemons
    with loading_bar("loading") as report:
        assert report is None


def test_what_has_stopped_still_counts(model_directory: Callable[[str], Path]) -> None:
    with InferenceEngine(EngineConfig(model=str(model_directory("llama")), dtype="float32", device="cpu")) as engine:
        engine.generate([5, 6], SHORT)
        before = engine.stats()
    assert engine.stats().cache == before.cache
    with pytest.raises(GenerationFailed, match="load a new one"):
        engine.generate([5, 6], SHORT)


async def test_what_ran_until_the_end_runs_no_more(model_directory: Callable[[str], Path]) -> None:
    engine = InferenceEngine(EngineConfig(model=str(model_directory("llama")), dtype="float32", device="cpu"))
    stream = engine.generate_stream([5, 6], GenerationParams(ignore_eos=True, max_tokens=10_000))
    await anext(stream)
    assert engine.close(10)
    assert [delta.finish_reason async for delta in stream][-1] == "cancelled"
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


def test_an_engine_cannot_be_sent_to_another_process() -> None:
    with InferenceEngine(CONFIG) as engine, pytest.raises(TypeError, match="load one in each process"):
        pickle.dumps(engine)


def test_a_model_may_be_named_by_a_path(tmp_path: Path) -> None:
    assert EngineConfig.model_validate({"model": tmp_path}).model == str(tmp_path)


def test_what_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read: File name too long; check the path"):
        InferenceEngine(EngineConfig(model=f"{tmp_path}/{'x' * 300}"))
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(ModelLoadError, match="cannot be read: Too many levels of symbolic links; check the path"):
        InferenceEngine(EngineConfig(model=str(tmp_path)))
    for read in (read_header, read_json):  # as a file without permission, which root may read
        with pytest.raises(ModelLoadError, match="cannot be read: Is a directory; check the path and its permissions"):
            read(tmp_path)


async def test_a_long_prompt_is_not_tokenised_in_the_event_loop_nor_to_its_end() -> None:
    lengths: dict[str, int] = {}  # of what was tokenised, by the names of threads

    class Noting(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            name = threading.current_thread().name
            lengths[name] = lengths.get(name, 0) + len(text)
            return super().encode(text, add_special_tokens)

    backend = EchoBackend(CONFIG)
    backend.tokenizer = Noting()
    with InferenceEngine(CONFIG, backend=backend) as engine:
        with pytest.raises(InvalidRequest, match="the prompt is too long: more than"):
            await engine.agenerate("a" * 10_000_000, SHORT)
        assert threading.current_thread().name not in lengths
        assert sum(lengths.values()) < 1_000_000


def test_the_prompt_of_many_that_is_refused_is_named() -> None:
    with InferenceEngine(CONFIG) as engine:
        with pytest.raises(Exception, match=r"^prompts\[700\]: The prompt is empty; send at least one token\.$"):
            engine.generate(["a"] * 700 + [""] + ["b"] * 299, SHORT)
        with pytest.raises(TypeError, match=r"^prompts\[1\]: a prompt must be text"):
            engine.generate(["a", None], SHORT)  # type: ignore[arg-type]
        assert engine.stats().num_requests == 0
