"""Show that guessed tokens change nothing, and what they bring: `same` compares answers, `speed` measures.

    python deploy/speculation.py same MODEL --requests 1000
    python deploy/speculation.py speed MODEL --quantization int4 --rounds 3

`same` runs seeded requests of many kinds with `speculation` on and off, in a cache too small for all of them, and ends
with 1 if a token, a log-probability, a text or a reason differs. `speed` decodes JSON under a schema, a text to be
edited and prose, one request at a time, on and off in turn, and prints medians of tokens a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import chain
from random import Random
from statistics import median
from typing import Any

from pydantic import ByteSize, TypeAdapter

from penstock.engine import EngineConfig, EngineRequest, GenerationParams
from penstock.engine.choice import Choice
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.paged.backend import PagedBackend
from penstock.schemas.events import Delta
from penstock.schemas.params import Grammar

_SCHEMA = (
    '{"type": "object", "properties": {"people": {"type": "array", "minItems": 4, "maxItems": 4, "items": {"type": '
    '"object", "properties": {"first_name": {"type": "string", "maxLength": 12}, "family_name": {"type": "string", '
    '"maxLength": 12}, "is_registered": {"type": "boolean"}, "year_of_birth": {"type": "integer", "minimum": 1900, '
    '"maximum": 2020}}, "required": ["first_name", "family_name", "is_registered", "year_of_birth"], '
    '"additionalProperties": false}}}, "required": ["people"], "additionalProperties": false}'
)
_TEXT = (
    "The river begins in a small lake above the village and runs through three valleys before it reaches the plain. "
    "In spring the snow melts and the water rises, so that the old stone bridge is closed for some weeks. The farmers "
    "then use the ferry, which carries two carts at a time. In summer children swim below the mill, and in autumn the "
    "banks are red and yellow. The mill itself has not worked since the fire, but its wheel still turns. "
)
_ASKED = {
    "json": "Write a JSON object with four people: first name, family name, whether registered, year of birth.",
    "edit": f"Repeat the following text exactly, but replace the word ferry by boat.\n\n{_TEXT}",
    "prose": "Tell me a story about a girl who finds an old map in her grandfather's house.",
}
Prompt = tuple[int, ...]
Drawn = tuple[Prompt, GenerationParams, int]
Answer = tuple[Any, ...]

_FORM = Grammar(kind="json_schema", text=_SCHEMA)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("same", "speed"))
    parser.add_argument("model", help="a directory, a GGUF file or a Hugging Face id")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kv-cache-memory", default="16MiB", help="of `same`; little, so that requests are preempted")
    parser.add_argument("--requests", type=int, default=1000, help="of `same`")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer of `speed`")
    parser.add_argument("--rounds", type=int, default=3, help="of `speed`")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    backends = {
        mode: PagedBackend(
            EngineConfig(
                model=given.model,
                dtype=given.dtype,
                quantization=given.quantization,
                device="cpu",
                speculation=mode,
                max_batch_size=8,
                max_sequence_length=1024,
                kv_cache_memory=TypeAdapter(ByteSize).validate_python(
                    "1GiB" if given.what == "speed" else given.kv_cache_memory
                ),
            )
        )
        for mode in ("auto", "off")
    }
    if off := backends["auto"].speculation_stats().off:
        print(f"nothing is guessed here: {off}")
        return 1
    return same(backends, given) if given.what == "same" else speed(backends, given)


def same(backends: dict[str, PagedBackend], given: argparse.Namespace) -> int:
    """Compare in groups of 20 requests; each group meets the prefixes that earlier ones left."""
    random, differing, done = Random(given.seed), 0, 0
    while done < given.requests:
        count = min(20, given.requests - done)
        drawn = [_drawn(random, backends["auto"]) for _ in range(count)]
        found = [_answers(backend, drawn) for backend in backends.values()]
        for one, with_guesses, without in zip(drawn, *found, strict=True):
            if with_guesses != without:
                differing += 1
                print(f"differs: {one}\n  {with_guesses}\n  {without}")
        done += count
        if not done % 100 or done == given.requests:
            print(f"{done} requests, {differing} differ; {backends['auto'].speculation_stats()}", flush=True)
    return int(differing > 0)


def _drawn(random: Random, backend: PagedBackend) -> Drawn:
    words = random.choices(range(5, min(backend.info.vocabulary_size, 20_000)), k=random.randint(1, 12))
    kinds: dict[str, Any] = {"max_tokens": random.randint(1, 48), "temperature": random.choice([0, 0.3, 1])}
    options: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.6},
        {"presence_penalty": -0.6},
        {"logit_bias": {words[0]: 6.0, words[-1]: 6.0}},
        {"logprobs": random.randint(0, 3)},
    ]
    for option in random.sample(options, random.randint(0, 3)):
        kinds |= option
    if random.random() < 0.25:
        kinds |= {"grammar": _FORM}
    else:
        rest: list[dict[str, Any]] = [{}, {"n": 2}, {"stop": (" a", "e ")}, {"min_tokens": 1}, {"ignore_eos": True}]
        kinds |= random.choice(rest)
    prompt = tuple(words * random.randint(1, 6) + random.choices(words, k=4))
    return prompt, GenerationParams(**kinds), random.getrandbits(40)


def _choices(name: str, backend: PagedBackend, prompt: Prompt, params: GenerationParams, seed: int) -> list[Choice]:
    request, compiler = EngineRequest(name, prompt, params, seed=seed), GrammarCompiler(backend.tokenizer)
    return [
        Choice(request, index, backend.tokenizer, backend.info, compiler.matcher(params)) for index in range(params.n)
    ]


def _answers(backend: PagedBackend, drawn: list[Drawn]) -> list[list[Answer]]:
    requests = [_choices(str(number), backend, *one) for number, one in enumerate(drawn)]
    seen: dict[tuple[str, int], list[Delta]] = {}
    for choice in chain(*requests):
        seen[choice.request.id, choice.number] = []
        backend.add(choice)
    while backend.delay() <= 0:
        for delta in backend.step():
            seen[delta.request, delta.choice].append(delta)
    backend.check_integrity()
    return [[_answer(seen[choice.request.id, choice.number]) for choice in choices] for choices in requests]


def _answer(deltas: list[Delta]) -> Answer:
    tokens = [token for delta in deltas for token in delta.token_ids]
    scores = [score for delta in deltas for score in delta.logprobs or ()]
    return tokens, "".join(delta.text for delta in deltas), scores, deltas[-1].finish_reason


def speed(backends: dict[str, PagedBackend], given: argparse.Namespace) -> int:
    print(
        f"{given.model}, {given.quantization or given.dtype}, {given.tokens} tokens, medians of {given.rounds} rounds"
    )
    print("load    off tok/s  auto tok/s  ratio  tokens a step  guessed  right")
    for load, asked in _ASKED.items():
        rates: dict[str, list[float]] = {mode: [] for mode in backends}
        before = backends["auto"].speculation_stats()
        tokens = steps = 0
        for round_number in range(given.rounds + 1):
            for mode, backend in backends.items():
                prompt = tuple(backend.tokenizer.encode_chat([{"role": "user", "content": asked}]))
                form = {"grammar": _FORM} if load == "json" else {"ignore_eos": load == "prose"}
                params = GenerationParams(max_tokens=given.tokens, temperature=0, **form)
                (choice,) = _choices("r", backend, prompt, params, 1)
                backend.add(choice)
                while not choice.tokens:
                    backend.step()
                count, begun, first = 0, time.perf_counter(), len(choice.tokens)
                while choice.finish is None:
                    backend.step()
                    count += 1
                if round_number:  # the first one warms up
                    rates[mode].append((len(choice.tokens) - first) / (time.perf_counter() - begun))
                if mode == "auto":
                    tokens, steps = tokens + len(choice.tokens) - first, steps + count
        after, off, on = backends["auto"].speculation_stats(), median(rates["off"]), median(rates["auto"])
        guessed = after.num_draft_tokens - before.num_draft_tokens
        right = after.num_accepted_tokens - before.num_accepted_tokens
        print(
            f"{load:6} {off:10.1f} {on:11.1f} {on / off:6.2f} {tokens / steps:14.2f} {guessed:8} {right:6}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
