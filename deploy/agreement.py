"""Compare greedy answers to twenty prompts, chats and plain texts, token by token: llama.cpp's with Penstock's.

    llama-server -m MODEL.gguf --port 8080
    python deploy/agreement.py MODEL.gguf http://127.0.0.1:8080 bfloat16 float32

The first side is what the others are compared with. A side is the URL of a llama-server, or a dtype of Penstock, which
reads the model here; all get the same token ids. A near-tie is a step at which the first side's best two tokens are
closer than `--tie` nats: which one wins there depends on rounding, and whatever follows depends on that. So the tokens
of an answer before its first near-tie count, and of those the ones before the first difference agree. Prints each
first difference, with the first side's distance of the best two there, and shares by each of several `--tie`. Ends
with 1 if, by the first of them, a side agrees in less than `--least` of what counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

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


class Answer(NamedTuple):
    """Tokens, a token that ends the answer included, and at each step the distance of the best two, in nats."""

    ids: tuple[int, ...]
    distances: tuple[float, ...]


def first_difference(first: Sequence[int], other: Sequence[int]) -> int | None:
    """The first step at which two answers differ, be it that one has ended there."""
    steps = enumerate(zip_longest(first, other))
    return next((step for step, (one, its) in steps if one != its), None)


def count_agreeing(first: Answer, other: Sequence[int], tie: float) -> tuple[int, int]:
    """The tokens of `first` before its first near-tie, and those of them that come before the first difference."""
    counted = next((step for step, distance in enumerate(first.distances) if distance < tie), len(first.ids))
    difference = first_difference(first.ids, other)
    return counted, counted if difference is None else min(counted, difference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, a directory or a Hugging Face id")
    parser.add_argument("first", help="the side to compare with: a URL or a dtype")
    parser.add_argument("others", nargs="+", help="more sides")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--tie", default="0.1", help="nats, several with commas")
    parser.add_argument("--least", type=float, default=0.95, help="share of the counted tokens that has to agree")
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True) for text in CHATS]
    prompts += [tokenizer.encode(text) for text in TEXTS]
    first = answers(given.first, given.model, prompts, given.tokens)
    return int(not all([report(side, first, prompts, tokenizer, given) for side in given.others]))


def answers(side: str, model: str, prompts: list[list[int]], tokens: int) -> list[Answer]:
    """The greedy answers of a side, one after the other."""
    if side.startswith(("http://", "https://")):
        with httpx2.Client(base_url=side, timeout=600.0) as client:
            return [of_llama_cpp(client, prompt, tokens) for prompt in prompts]
    config = EngineConfig.model_validate({"model": model, "dtype": side, "max_sequence_length": 1024})
    with InferenceEngine(config) as engine:
        return [of_penstock(engine, prompt, tokens) for prompt in prompts]


def of_llama_cpp(client: httpx2.Client, prompt: list[int], tokens: int) -> Answer:
    """An answer of llama-server's own endpoint, without what it remembers of earlier prompts."""
    asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "n_probs": 2, "cache_prompt": False}
    steps = client.post("/completion", json=asked).raise_for_status().json()["completion_probabilities"]
    best = [[one["logprob"] for one in step["top_logprobs"]] for step in steps]
    return Answer(tuple(step["id"] for step in steps), tuple(one - other for one, other in best))


def of_penstock(engine: InferenceEngine, prompt: list[int], tokens: int) -> Answer:
    output = engine.generate(prompt, GenerationParams(max_tokens=tokens, temperature=0, logprobs=2))
    tops = [step.top for step in output.logprobs or ()]
    return Answer(output.token_ids, tuple(one.logprob - other.logprob for one, other in tops))


def report(
    side: str, first: list[Answer], prompts: list[list[int]], tokenizer: TokenizerLike, given: argparse.Namespace
) -> bool:
    """Print how far a side agrees; whether that is far enough."""
    found = answers(side, given.model, prompts, given.tokens)
    differences = [first_difference(one.ids, other.ids) for one, other in zip(first, found, strict=True)]
    for prompt, one, other, step in zip(prompts, first, found, differences, strict=True):
        if step is not None:
            texts = [repr(tokenizer.decode(answer.ids[step : step + 1])) for answer in (one, other)]
            distance = f"{one.distances[step]:.3f} nats" if step < len(one.ids) else "it had ended"
            start = repr(tokenizer.decode(prompt[-12:]))
            print(
                f"  {side}, …{start}, step {step}: {texts[0]} became {texts[1]}; distance of the best two: {distance}"
            )
    before = sum(len(one.ids) if step is None else step for one, step in zip(first, differences, strict=True))
    print(
        f"{side} beside {given.first}: {differences.count(None)} of {len(first)} answers are the same as a whole; "
        f"{before} of {sum(len(one.ids) for one in first)} tokens come before the first difference"
    )
    shares = []
    for tie in map(float, given.tie.split(",")):
        parts = [count_agreeing(one, other.ids, tie) for one, other in zip(first, found, strict=True)]
        counted, agreeing = (sum(numbers) for numbers in zip(*parts, strict=True))
        shares.append(agreeing / max(1, counted))
        print(
            f"  {agreeing} of {counted} tokens before the first near-tie of {tie:g} nats agree, {shares[-1]:.1%}",
            flush=True,
        )
    return bool(shares[0] >= given.least)


if __name__ == "__main__":
    sys.exit(main())
