"""Records what this version of Penstock sends and keeps, one JSON file each, for later versions to read.

    python tests/schemas/recorded/generate.py tests/schemas/recorded/0.1.0

Run it once, with the release that the folder is named after on the path (`git worktree add DIR/penstock TAG`,
`PYTHONPATH=DIR`), and never again for that folder: the files are what that release wrote, whatever is right today.
`messages.json` holds messages with their headers, `buckets.json` entries of buckets, `meaning.json` what they mean.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def module(name: str) -> Any:
    """A module of the release that is on the path; what it holds is the business of that release alone."""
    return importlib.import_module(f"penstock.{name}")


RESPONSE = "resp_" + "a" * 32
LOGPROB = {"token": "é", "token_id": 7, "logprob": -0.25, "bytes": (195, 169)}


def jobs() -> dict[str, Any]:
    types, params = module("schemas.jobs"), module("schemas.params")
    body = {"model": "m", "messages": [{"role": "user", "content": "Grüße 😀"}], "metadata": {"n": 2**63}}
    chat = types.ValidatedJob(
        id="req-1",
        endpoint="/v1/chat/completions",
        bridge="b1",
        tenant="acme",
        priority="high",
        model="org/model",
        prompts=((1, 2, 3),),
        params=params.GenerationParams(
            max_tokens=12,
            min_tokens=1,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            repetition_penalty=1.1,
            frequency_penalty=-0.5,
            presence_penalty=0.5,
            stop=("END", "\n"),
            stop_token_ids=(2,),
            logprobs=2,
            logit_bias={11: -100.0, 12: 1.5},
            seed=-(2**63),
            n=2,
            ignore_eos=True,
            grammar=params.Grammar(kind="regex", text="[a-z]+"),
            visible_token_ids=(151_657,),
        ),
        created=1_790_000_000.25,
        deadline=1_790_000_600.25,
        body=body,
        form=types.Form(
            tool_format="hermes",
            reasoning_format="think",
            tools={"add": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            thinking=True,
            choice="required",
            echo=("hello",),
        ),
    )
    embeddings = types.ValidatedJob(
        id="req-2",
        endpoint="/v1/embeddings",
        bridge="b1",
        tenant="default",
        priority="low",
        model="m",
        prompts=((4,), (5, 6)),
        params=params.GenerationParams(),
        created=1.0,
        deadline=2.0,
        body={},
        dimensions=256,
    )
    batch = types.InferenceBatch(
        id="f" * 32, worker="w0", jobs=(chat, embeddings), incarnation="i1", epochs=(0, 3), sender="c0ffee00"
    )
    whole = types.Job(id="req-1", endpoint="/v1/chat/completions", bridge="b1", timeout=2.5, body=body)
    return {"job": whole, "client's job": types.Job(body=body), "chat": chat, "embeddings": embeddings, "batch": batch}


def loops() -> dict[str, Any]:
    types = module("schemas.loops")
    job = types.LoopJob(
        id=RESPONSE, tenant="acme", priority="normal", bridge="b1", created=1.5, deadline=900.5, body={"model": "m"}
    )
    return {"loop job": job, "step": types.Step(id=RESPONSE, turn=f"{RESPONSE}-1-2", tenant="acme", bridge="b1")}


def outputs() -> dict[str, list[Any]]:
    types = module("schemas.events")
    logprob = types.TokenLogprob(**LOGPROB, top=(types.TopLogprob(**LOGPROB),))
    form = {"tool_format": "hermes", "tools": {}, "choice": "auto"}
    error = types.ErrorBody(500, "The engine failed.", "server_error", "generation_failed", None, 1.5)
    return {
        "started": [
            types.Started("req-1", 2, "w0.i1", "acme", "b1", 2, 3, form),
            types.Delta("req-1", 2, 0, 0, (7,), "é", (logprob,)),
        ],
        "delta": [types.Delta("req-1", 2, 1, 4, (8, 2), "", None, "stop_sequence", 16)],
        "failed delta": [types.Delta("req-1", 1, 0, 0, (), "", None, "error", 0, error)],
    }


def events() -> list[Any]:
    types = module("schemas.events")
    logprob = types.TokenLogprob(**LOGPROB, top=(types.TopLogprob(**LOGPROB),))
    error = types.ErrorBody(429, "Too many.", "rate_limit_error", "queue_full", "model", 2.5)
    usage = types.Usage(3, 5, 8, 2, 1)
    call = types.ToolCallDelta(0, '{"a":', "call_1", "add")
    return [
        types.Accepted("req-1", "org/model", 1_790_000_000, 3),
        types.Queued("req-1", 12),
        types.Token("req-1", 1, 4, (7, 8), "é", (logprob,), None, "thought", (call,)),
        types.Token("req-1", 0, 6, (), "", None, "tool_calls"),
        types.Done("req-1", ("stop", "length"), usage, 1_790_000_010.5),
        types.Failed("req-1", error),
        types.Cancelled("req-1", usage),
        types.Expired("req-1", types.ErrorBody(408, "Too late.", "timeout_error")),
        types.ItemEvent(RESPONSE, 3, {"id": "mcpl_1", "type": "mcp_list_tools", "tools": []}, False),
        types.Turn(RESPONSE, 4, f"{RESPONSE}-1", {"add": {"label": "sums", "tool": "add", "approval": True}}),
    ]


def cards() -> dict[str, Any]:
    types = module("schemas.registry")
    model = types.ModelCard(
        name="org/model",
        source="/models/m",
        backend="paged",
        context_length=4096,
        created=1_790_000_000,
        tool_format="hermes",
        reasoning_format="think",
    )
    worker = types.WorkerCard(id="w0", model=model, capacity=16, pid=7, incarnation="i1", host="h1")
    room = types.Room(
        worker="w0", incarnation="i1", free=3, free_high=7, received={"c0ffee00": 9}, active=13, free_tokens=2048
    )
    return {
        "model": model,
        "worker": worker,
        "stage": types.StageCard(stage="queue", id="c0ffee00", pid=8),
        "room": room,
        "admission": types.Admission(
            accepting={"high": True, "normal": True, "low": False},
            retry_after={"high": 1.0, "normal": 1.0, "low": 7.5},
            depth={"high": 0, "normal": 5, "low": 99},
        ),
    }


def kept() -> dict[str, Any]:
    types, batches = module("schemas.loops"), module("schemas.batches")
    items = [{"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "é"}]}]
    source = types.Source(
        label="sums", url="https://example.com/mcp", sealed="c2VhbGVk", allowed=("add",), approval=("add",), spared=()
    )
    tool = types.LoopTool(
        name="add", label="sums", tool="add", description="Adds.", parameters={"type": "object"}, approval=True
    )
    job = loops()["loop job"]
    begun = types.Begun(
        job=job, sources=(source,), tools=(tool,), history=items, input=items, items=[{"id": "mcpl_1"}], index=2
    )
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "cached_tokens": 0, "reasoning_tokens": 1}
    return {
        "begun": begun,
        "turned": types.Turned(turn=1, items=[{"id": "msg_2"}], reason="tool_calls", usage=usage, index=9),
        "ended": types.Ended(status="failed", at=1_790_000_020.5, error={"status": 500, "message": "No."}),
        "conversation": module("streams.conversations").Conversation(
            id="conv_1", created_at=1_790_000_000, metadata={"a": "b"}, parts=(), removed=("msg_9",)
        ),
        "items": items,
        "result": types.ToolResult("4", False),
        "files batch": batches.Batch(
            id="batch_1",
            endpoint="/v1/completions",
            input_file_id="file-1",
            status="in_progress",
            created_at=1,
            expires_at=86401,
            in_progress_at=2,
            errors=batches.Faults(data=[batches.Fault(code="bad", message="No.", line=3)]),
            request_counts=batches.Counts(total=3, completed=1, failed=1),
            metadata={"a": "b"},
            tenant="acme",
            output_ttl=3600.0,
        ),
    }


def messages() -> list[dict[str, Any]]:
    codec = module("schemas.wire.codec")
    headers = {"Nats-Msg-Id": "req-1", "Penstock-Deadline": "1790000600.250"}
    whole, found = jobs() | loops(), []

    def add(name: str, kind: str, schema: str | None, data: bytes, **more: str) -> None:
        said = {} if schema is None else {"Penstock-Schema": schema}
        found.append({"name": name, "kind": kind, "headers": headers | said | more, "data": data.decode()})

    add("job", "Job", codec.JOB, codec.encode(whole["job"]))
    add("client's job", "Job", None, codec.encode(whole["client's job"]))
    ahead = "penstock.batch.high.acme"
    for name in ("chat", "embeddings"):
        add(name, "ValidatedJob", codec.VALIDATED_JOB, codec.encode(whole[name]), **{"Penstock-Next": ahead})
    add("batch", "InferenceBatch", codec.BATCH, codec.encode(whole["batch"]))
    add("loop job", "LoopJob", codec.LOOP_JOB, codec.encode(whole["loop job"]))
    add("step", "Step", codec.STEP, codec.encode(whole["step"]))
    for name, several in outputs().items():
        add(name, "Outputs", codec.OUTPUTS, codec.encode_outputs(several))
    for event in events():
        add(event.type, "Event", codec.EVENT, codec.encode(event))
    for name, card in cards().items():
        add(name, type(card).__name__, None, card.model_dump_json().encode())
    add("files batch", "Batch", None, kept()["files batch"].model_dump_json().encode())
    return found


async def buckets() -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """What a response, its calls and a conversation leave in the buckets, written by the release's own code."""
    memory, topology, log_of = module("streams.memory"), module("streams.topology"), module("streams.response_log")
    broker = memory.MemoryBroker()
    await broker.ensure(*topology.topology("penstock", ["queue"]))
    log, entries = await log_of.ResponseLog.of(broker), kept()
    for name in ("begun", "turned", "ended"):
        await log.write("acme", RESPONSE, entries[name])
    await log.ask_to_stop("acme", RESPONSE)
    await log.keep_sealed("acme", RESPONSE, {"sums": "c2VhbGVk"})
    await log.claim(log_of.CallKey("acme", RESPONSE, 0, 0), "c0ffee00")
    settled = log_of.CallKey("acme", RESPONSE, 1, 0)
    await log.settle(settled, await log.claim(settled, "c0ffee00"), entries["result"])
    conversations = await module("streams.conversations").Conversations.of(broker)
    await conversations.create("acme", entries["conversation"])
    await conversations.add("acme", "conv_1", RESPONSE, entries["items"])
    held = {
        name: {entry.key: entry.value.decode() for entry in await (await broker.bucket(name)).entries()}
        for name in (topology.RESPONSES, topology.OBJECT_DATA)
    }
    dumped = {name: entries[name].model_dump(mode="json") for name in ("begun", "turned", "ended", "conversation")}
    return held, dumped | {"items": entries["items"], "result": list(entries["result"])}


def main(folder: Path) -> None:
    held, meaning = asyncio.run(buckets())
    for name, content in (("messages", messages()), ("buckets", held), ("meaning", meaning)):
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
