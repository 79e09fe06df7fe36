"""How much of a model's quality a dtype or a quantisation keeps: the engine beside transformers in float32.

    python deploy/quality.py MODEL --quantization int4

Prose is read token by token, as a decoding step reads it: the mean divergence of the engine's distribution from that of
float32, both perplexities, and how often the best token is the same. Then questions are answered greedily, and each
answer is followed up to the first token that float32 would not have chosen: where the logits of the two are almost
equal, that was a near-tie.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pydoc_data.topics import topics
from typing import Any

import torch
from pydantic import ByteSize
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.packing import Segment

ROWS, LENGTH, BLOCK, ANSWER = 16, 256, 16, 64
QUESTIONS = """What is the capital of France?
Why is the sky blue?
Write a haiku about the sea.
What is 17 plus 25?
Name three primary colours.
Who wrote Hamlet?
Explain photosynthesis to a child.
What does a compiler do?
Give me a recipe for pancakes.
Translate "good morning" into Spanish.
What is the largest planet?
How do I boil an egg?
List the days of the week.
What is a prime number?
Tell me a short story about a fox.
How many legs does a spider have?
What causes tides?
Write a Python function that adds two numbers.
What is the opposite of hot?
Summarise the water cycle in one sentence.""".splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    options = parser.parse_args()
    shape = {"dtype": options.dtype, "quantization": options.quantization, "device": "cpu"}
    config = EngineConfig(model=options.model, kv_cache_memory=ByteSize(512 << 20), max_batch_size=ROWS, **shape)
    reference: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    prose(config, reference)
    answers(config, reference)


@torch.inference_mode()
def prose(config: EngineConfig, reference: Any) -> None:
    backend = PagedBackend(config)
    runner: Any = backend._runner
    text = "\n\n".join(islice(topics.values(), 40))
    ids = backend.tokenizer.encode(text)[: ROWS * LENGTH]
    rows = [ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH)]
    each = LENGTH // BLOCK
    tables = [[list(range(row * each, (row + 1) * each))] for row in range(len(rows))]
    divergence, surprise, right_surprise, same = 0.0, 0.0, 0.0, 0
    exact: Tensor = reference(torch.tensor(rows)).logits.log_softmax(-1)
    for place in range(LENGTH - 1):
        step = [Segment([row[place]], place, table, True) for row, table in zip(rows, tables, strict=True)]
        logits, sampled, _ = runner.forward(step)
        found = logits.float()[torch.tensor(sampled).argsort()].log_softmax(-1)
        right, following = exact[:, place], torch.tensor([row[place + 1] for row in rows])[:, None]
        divergence += float((right.exp() * (right - found)).sum())
        surprise -= float(found.gather(1, following).sum())
        right_surprise -= float(right.gather(1, following).sum())
        same += int((found.argmax(-1) == right.argmax(-1)).sum())
    count = len(rows) * (LENGTH - 1)
    perplexities = [float(torch.tensor(total / count).exp()) for total in (surprise, right_surprise)]
    for reason in backend.info.slow_paths:
        print(f"slow: {reason}")
    print(f"{count} tokens of prose: divergence {divergence / count:.4f}, the same best token {same / count:.1%},")
    print(f"perplexity {perplexities[0]:.2f}, in float32 {perplexities[1]:.2f}")
    backend.close()


@torch.inference_mode()
def answers(config: EngineConfig, reference: Any) -> None:
    params = GenerationParams(temperature=0, max_tokens=ANSWER)
    with InferenceEngine(config) as engine:
        prompts = [
            engine.tokenizer.encode(
                engine.tokenizer.render_chat([{"role": "user", "content": question}], add_generation_prompt=True),
                add_special_tokens=False,
            )
            for question in QUESTIONS
        ]
        outputs = engine.generate(prompts, params)
    same, margins = 0, []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.token_ids)
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        places = [place for place, token in enumerate(tokens) if int(logits[place].argmax()) != token]
        if not places:
            same += 1
            continue
        first = places[0]
        margins.append(float(logits[first].max() - logits[first, tokens[first]]))
    spread = ", ".join(f"{margin:.2f}" for margin in sorted(margins))
    print(
        f"{len(outputs)} answers of up to {ANSWER} tokens: {same} the same; logits at the first other token: {spread}"
    )
    print(f"the first: {outputs[0].text!r}")


if __name__ == "__main__":
    main()
