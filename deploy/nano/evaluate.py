"""Examine a model on conversations it was never trained on, through Penstock's HTTP bridge.

    penstock serve deploy/nano/model --served-model-name penstock-nano &
    python deploy/nano/evaluate.py --url http://127.0.0.1:8000/v1

Greedy. Prints a table, with `--json` an object, with `--failures N` what went wrong. `--model DIR` examines in this
process with Penstock's engine instead, without a server; replies held to a schema need the server and are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from corpus import SKILLS
from rich.console import Console
from rich.table import Table
from scoring import SCHEMA, TARGETS, Ask, Question, Reply, Result, examine, make_case, parse_hermes

MAX_TOKENS = 400


class Bridge:
    """Asks a server by OpenAI's API."""

    def __init__(self, url: str, model: str, client: httpx2.AsyncClient) -> None:
        self.url, self.model, self.client = url.rstrip("/"), model, client

    async def ask(self, question: Question) -> Reply:
        """The server's reply. Raises `httpx2.HTTPStatusError` with its words where it refuses."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": MAX_TOKENS}
        body["messages"] = with_call_ids(question.messages)
        if question.tools:
            body["tools"] = question.tools
        if question.thinking:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        if question.schema:
            form = {"name": "record", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        response = await self.client.post(f"{self.url}/chat/completions", json=body)
        if response.is_error:
            raise httpx2.HTTPStatusError(response.text, request=response.request, response=response)
        message = response.json()["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        text = (message.get("content") or "").split("</think>")[-1].strip()
        return Reply(text, [(call["name"], _loads(call["arguments"])) for call in calls])


def with_call_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the API wants them: calls have ids and arguments in a string, and results name their call."""
    result: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = [f"call_{len(result)}_{place}" for place in range(len(calls))]
            functions = [{**call["function"], "arguments": json.dumps(call["function"]["arguments"])} for call in calls]
            pairs = zip(waiting, functions, strict=True)
            message = {**message, "tool_calls": [{"id": i, "type": "function", "function": f} for i, f in pairs]}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": waiting.pop(0)}
        result.append(message)
    return result


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


async def examine_skill(skill: str, count: int, seed: int, ask: Ask, limit: asyncio.Semaphore) -> list[Result]:
    """The results of `count` cases."""

    async def one(index: int) -> Result:
        async with limit:
            return await examine(skill, make_case(skill, seed, index), ask)

    return await asyncio.gather(*(one(index) for index in range(count)))


async def run(options: argparse.Namespace) -> dict[str, list[Result]]:
    """All results by skill."""
    skills = options.skills or [*TARGETS, *(skill for skill in SKILLS if skill not in TARGETS)]
    limit = asyncio.Semaphore(options.concurrency)
    results: dict[str, list[Result]] = {}
    if options.model is not None:
        from penstock.engine import EngineConfig, GenerationParams, InferenceEngine, load_tokenizer

        tokenizer: Any = load_tokenizer(str(options.model))
        parameters = GenerationParams(max_tokens=MAX_TOKENS, temperature=0)
        with InferenceEngine(EngineConfig(model=str(options.model), dtype=options.dtype)) as engine:

            async def ask(question: Question) -> Reply:
                thinking = {"enable_thinking": True} if question.thinking else {}
                ids = tokenizer.encode_chat(question.messages, question.tools, **thinking)
                return parse_hermes((await engine.agenerate(ids, parameters)).raw_text)

            for skill in skills:
                if skill != SCHEMA:
                    results[skill] = await examine_skill(skill, options.count, options.seed, ask, limit)
        return results
    async with httpx2.AsyncClient(timeout=300) as client:
        model = options.name
        if model is None:
            listed = (await client.get(f"{options.url.rstrip('/')}/models")).raise_for_status().json()
            model = listed["data"][0]["id"]
        bridge = Bridge(options.url, model, client)
        for skill in skills:
            results[skill] = await examine_skill(skill, options.count, options.seed, bridge.ask, limit)
    return results


def show(results: dict[str, list[Result]], failures: int, as_json: bool) -> bool:
    """Print what was reached; True if every target was."""
    shares = {skill: sum(one.right for one in ones) / len(ones) for skill, ones in results.items()}
    if as_json:
        rows = {s: {"right": shares[s], "n": len(results[s]), "target": TARGETS.get(s)} for s in results}
        print(json.dumps(rows, indent=2))
    else:
        table = Table("skill", "right", "n", "target")
        for skill, share in shares.items():
            target = f"{TARGETS[skill]:.0%}" if skill in TARGETS else ""
            style = "red" if share < TARGETS.get(skill, 0) else ""
            table.add_row(skill, f"{share:.1%}", str(len(results[skill])), target, style=style)
        Console().print(table)
    for skill, ones in results.items():
        for one in [one for one in ones if not one.right][:failures]:
            print(f"\n{skill}: {one.asked}\n  expected {one.expected}\n  said     {one.said}")
    return all(share >= TARGETS.get(skill, 0) for skill, share in shares.items())


def main() -> int:
    """Read the command line and examine; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of a server (default: %(default)s)")
    parser.add_argument("--name", help="of the model there (default: the first it lists)")
    parser.add_argument("--model", type=Path, help="a model's directory: examine it here, without a server")
    parser.add_argument("--dtype", default="bfloat16", help="with --model (default: %(default)s)")
    parser.add_argument("--count", type=int, default=200, help="cases of a skill (default: %(default)s)")
    parser.add_argument("--skills", nargs="*", choices=(SCHEMA, *SKILLS), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--failures", type=int, default=0, help="print so many wrong cases of each skill")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    return 0 if show(asyncio.run(run(options)), options.failures, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
