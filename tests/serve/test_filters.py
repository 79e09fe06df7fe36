"""A filter in a process of its own: it is killed in the middle of sampled answers, and so is the worker."""

from __future__ import annotations

import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
from serving import Process, Start

MASK = Path(__file__).parents[2] / "deploy" / "examples" / "mask.py"
WORDS = ("the", "a", "and", "is", "of")
PROMPTS = [f"{place} + 2 = {place + 2}. The" for place in range(6)]
TOKENS = 400


class Answers:
    """Sampled answers to all prompts, asked at once and streamed."""

    def __init__(self, url: str) -> None:
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._length = 0
        self._grown = threading.Condition()
        self._asked = [self._pool.submit(self._ask, seed, prompt) for seed, prompt in enumerate(PROMPTS)]

    def _ask(self, seed: int, prompt: str) -> str:
        text = ""
        for chunk in self._client.completions.create(
            model="penstock-nano",
            prompt=prompt,
            seed=seed,
            temperature=1.0,
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            text += chunk.choices[0].text
            with self._grown:
                self._length += len(chunk.choices[0].text)
                self._grown.notify_all()
        return text

    def grow(self) -> None:
        """Return when clients have read more than now."""
        with self._grown:
            until = self._length + 20
            assert self._grown.wait_for(lambda: self._length >= until, 60.0)

    def all(self) -> list[str]:
        texts = [one.result() for one in self._asked]
        self._pool.shutdown()
        self._client.close()
        return texts

    @property
    def running(self) -> bool:
        return not any(one.done() for one in self._asked)


def worker_of(served: Process) -> psutil.Process:
    (worker,) = [child for child in psutil.Process(served.pid).children() if "worker" in child.cmdline()]
    return worker


def test_clients_read_the_same_whoever_dies(start: Start, nats_url: str) -> None:
    environment = {
        "PENSTOCK_NATS_URL": nats_url,
        "PENSTOCK_PIPELINE": "validate,queue,batch,infer,mask,stream",
        "PENSTOCK_LEASE": "1",
        "PENSTOCK_HEARTBEAT_INTERVAL": "0.5",
        "MASKED_WORDS": ",".join(WORDS),
    }
    served = start("serve", "--port", "0", "--dtype", "float32", environment=environment)
    served.wait_for(r"answers wait for a process with these filters, started as: penstock stage FILE\.py:Class.*mask")
    mask = start("stage", f"{MASK}:Mask", environment=environment)
    url = served.wait_for(r"penstock ready (http://\S+)")[1]

    undisturbed = Answers(url).all()
    assert any("*****" in text for text in undisturbed), undisturbed
    assert not any(re.search(rf"\b({'|'.join(WORDS)})\b", text, re.IGNORECASE) for text in undisturbed)

    disturbed = Answers(url)
    disturbed.grow()
    mask.send(signal.SIGKILL)
    mask.wait()
    assert disturbed.running
    start("stage", f"{MASK}:Mask", environment=environment)
    assert disturbed.all() == undisturbed

    again = Answers(url)
    again.grow()
    worker_of(served).kill()
    assert again.running
    assert again.all() == undisturbed


def test_a_stream_stage_without_the_filters_does_not_start(start: Start, nats_url: str) -> None:
    environment = {
        "PENSTOCK_NATS_URL": nats_url,
        "PENSTOCK_PIPELINE": "validate,queue,batch,infer,mask,stream",
    }
    bare = start("stage", "validate", "stream", environment=environment)
    assert bare.wait() == 2
    assert "mask is not here: name its file too, as in `penstock stage FILE.py:Class`" in bare.output
    light = start("stage", "validate", environment=environment)
    light.wait_for("running")


def test_a_stage_that_no_request_passes_does_not_start(start: Start, nats_url: str) -> None:
    block = f"{MASK.with_name('blocklist.py')}:Blocklist"
    idle = start("stage", block, environment={"PENSTOCK_NATS_URL": nats_url})
    assert idle.wait() == 2
    assert "the stage blocklist is not in the pipeline validate,queue,batch,infer,stream; name it there" in idle.output
    double = start("stage", block, block, environment={"PENSTOCK_NATS_URL": nats_url})
    assert double.wait() == 2
    assert "the stage blocklist is named twice; start a process for each copy" in double.output
