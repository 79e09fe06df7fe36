"""Compare greedy answers to twenty prompts, chats and plain texts, token by token: llama.cpp's with Penstock's.

    llama-server -m MODEL.gguf --port 8080
    python deploy/agreement.py MODEL.gguf http://127.0.0.1:8080 bfloat16 float32

The first side is what the others are compared with. A side is the URL of a llama-server, or a dtype of Penstock, which
reads the model here; all get the same token ids. For each other side it prints

- how it judges the first side's answers: behind the same tokens, whether its best token is the same at each step, and
  how far apart the two that were best on the first side are. What that distance moves by, as a standard deviation, is
  the noise between both arithmetics;
- its own answers: each first difference, and shares by near-ties. A near-tie is a step at which the first side's best
  two tokens are closer than twice the noise, or than `--tie` nats: which one wins there depends on rounding, and
  whatever follows depends on that. So the tokens of an answer before its first near-tie count, and of those the ones
  before the first difference agree.

Ends with 1 if a side has the same best token at less than `--least` of all steps, near-ties included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from statistics import pstdev
from typing import Any, NamedTuple, Protocol

import httpx2

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine, load_tokenizer
from penstock.engine.text.tokenizer_port import TokenizerLike

CHATS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "List five fruits.",
    "How do I boil an egg?",
    "Translate to Spanish: Good morning, my friend.",
    "What is 12 plus 30?",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Give me three tips for sleeping better.",
)
TEXTS = (
    "The river begins in a small lake above the village and",
    "Once upon a time there was a girl who",
    "def fibonacci(n):\n    ",
    "The three most important inventions of the nineteenth century are",
    "Water boils at 100 degrees Celsius because",
    '{"name": "Anna", "age": 31, "city": "',
    "Monday, Tuesday, Wednesday,",
    "In economics, inflation is",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM orders",
)


TOLD = 20  # tokens whose log-probabilities a side tells at each step

Step = Mapping[int, float]
"""The log-probabilities of the best tokens, at one step."""


class Answer(NamedTuple):
    """Tokens, a token that ends the answer included, and at each step the second best and its distance, in nats."""

    ids: tuple[int, ...]
    distances: tuple[float, ...]
    rivals: tuple[int, ...]


class Judgement(NamedTuple):
    """Of how many steps the best token is the same, the noise, and the largest distance at which it is another."""

    steps: int
    same: int
    noise: float
    widest: float


def judgement_of(answers: Sequence[Answer], told: Sequence[Sequence[Step]]) -> Judgement:
    """What a side has `told` behind the tokens of another side's answers."""
    moves, differing = [], []
    for answer, steps in zip(answers, told, strict=True):
        for best, rival, distance, step in zip(answer.ids, answer.rivals, answer.distances, steps, strict=True):
            least = min(step.values())  # of one that is not among those told
            moves.append(step.get(best, least) - step.get(rival, least) - distance)
            if max(step, key=step.__getitem__) != best:
                differing.append(distance)
    return Judgement(len(moves), len(moves) - len(differing), pstdev(moves), max(differing, default=0.0))


def first_difference(first: Sequence[int], other: Sequence[int]) -> int | None:
    """The first step at which two answers differ, be it that one has ended there."""
    steps = enumerate(zip_longest(first, other))
    return next((step for step, (one, its) in steps if one != its), None)


def count_agreeing(first: Answer, other: Sequence[int], tie: float) -> tuple[int, int]:
    """The tokens of `first` before its first near-tie, and those of them that come before the first difference."""
    counted = next((step for step, distance in enumerate(first.distances) if distance < tie), len(first.ids))
    difference = first_difference(first.ids, other)
    return counted, counted if difference is None else min(counted, difference)


class Side(Protocol):
    def answer(self, prompt: list[int], tokens: int) -> Answer: ...

    def judge(self, prompt: list[int], ids: Sequence[int]) -> list[Step]:
        """Behind the prompt, and behind each of the tokens but the last."""


class LlamaServer:
    """llama-server's own endpoint."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        """Without what it remembers of earlier prompts."""
        steps = self._complete(prompt, tokens, 2, remembers=False)
        best = [[(one["id"], one["logprob"]) for one in step["top_logprobs"]] for step in steps]
        distances = tuple(one[1] - other[1] for one, other in best)
        return Answer(tuple(step["id"] for step in steps), distances, tuple(other[0] for _, other in best))

    def judge(self, prompt: list[int], ids: Sequence[int]) -> list[Step]:
        found = [self._complete([*prompt, *ids[:step]], 1, TOLD, remembers=True)[0] for step in range(len(ids))]
        return [{one["id"]: one["logprob"] for one in step["top_logprobs"]} for step in found]

    def _complete(self, prompt: list[int], tokens: int, told: int, remembers: bool) -> list[dict[str, Any]]:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "n_probs": told, "cache_prompt": remembers}
        answer = self._client.post("/completion", json=asked).raise_for_status().json()
        steps: list[dict[str, Any]] = answer["completion_probabilities"]
        return steps


class Penstock:
    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        output = self._engine.generate(prompt, GenerationParams(max_tokens=tokens, temperature=0, logprobs=2))
        tops = [step.top for step in output.logprobs or ()]
        distances = tuple(one.logprob - other.logprob for one, other in tops)
        return Answer(output.token_ids, distances, tuple(other.token_id for _, other in tops))

    def judge(self, prompt: list[int], ids: Sequence[int]) -> list[Step]:
        params = GenerationParams(max_tokens=1, temperature=0, prompt_logprobs=TOLD)
        scored = self._engine.generate([*prompt, *ids], params).prompt_logprobs or ()
        return [{one.token_id: one.logprob for one in entry.top} for entry in scored[len(prompt) :]]


@contextmanager
def opened(side: str, model: str) -> Iterator[Side]:
    if side.startswith(("http://", "https://")):
        with httpx2.Client(base_url=side, timeout=600.0) as client:
            yield LlamaServer(client)
        return
    config = EngineConfig.model_validate({"model": model, "dtype": side, "max_sequence_length": 1024})
    with InferenceEngine(config) as engine:
        yield Penstock(engine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, a directory or a Hugging Face id")
    parser.add_argument("first", help="the side to compare with: a URL or a dtype")
    parser.add_argument("others", nargs="+", help="more sides")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--tie", default="0.1,0.3", help="nats, several with commas")
    parser.add_argument("--least", type=float, default=0.95, help="share of the steps that has to agree")
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True) for text in CHATS]
    prompts += [tokenizer.encode(text) for text in TEXTS]
    with opened(given.first, given.model) as side:
        first = [side.answer(prompt, given.tokens) for prompt in prompts]
    return int(not all([report(name, first, prompts, tokenizer, given) for name in given.others]))


def report(
    name: str, first: list[Answer], prompts: list[list[int]], tokenizer: TokenizerLike, given: argparse.Namespace
) -> bool:
    """Print how far a side agrees; whether that is far enough."""
    with opened(name, given.model) as side:
        found = [side.answer(prompt, given.tokens) for prompt in prompts]
        told = [side.judge(prompt, answer.ids) for prompt, answer in zip(prompts, first, strict=True)]
    judged = judgement_of(first, told)
    share = judged.same / judged.steps
    print(
        f"{name} behind the tokens of {given.first}: the same best token at {judged.same} of {judged.steps} steps, "
        f"{share:.1%}; the noise is {judged.noise:.3f} nats; where the best differ, they are at most "
        f"{judged.widest:.3f} nats apart"
    )
    differences = [first_difference(one.ids, other.ids) for one, other in zip(first, found, strict=True)]
    for prompt, one, other, step in zip(prompts, first, found, differences, strict=True):
        if step is not None:
            texts = [repr(tokenizer.decode(answer.ids[step : step + 1])) for answer in (one, other)]
            distance = f"{one.distances[step]:.3f} nats" if step < len(one.ids) else "it had ended"
            start = repr(tokenizer.decode(prompt[-12:]))
            print(
                f"  {name}, …{start}, step {step}: {texts[0]} became {texts[1]}; distance of the best two: {distance}"
            )
    before = sum(len(one.ids) if step is None else step for one, step in zip(first, differences, strict=True))
    print(
        f"{name} beside {given.first}: {differences.count(None)} of {len(first)} answers are the same as a whole; "
        f"{before} of {sum(len(one.ids) for one in first)} tokens come before the first difference"
    )
    for tie in (2 * judged.noise, *map(float, given.tie.split(","))):
        parts = [count_agreeing(one, other.ids, tie) for one, other in zip(first, found, strict=True)]
        counted, agreeing = (sum(numbers) for numbers in zip(*parts, strict=True))
        print(
            f"  {agreeing} of {counted} tokens before the first near-tie of {tie:.3g} nats agree, "
            f"{agreeing / max(1, counted):.1%}",
            flush=True,
        )
    return bool(share >= given.least)


if __name__ == "__main__":
    sys.exit(main())
