"""`penstock schema`: JSON Schemas of every message, and an AsyncAPI 3.0 document of the subjects.

AsyncAPI: https://www.asyncapi.com/docs/reference/specification/v3.0.0
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from ..events import Event, Output
from ..jobs import InferenceBatch, Job, ReplayRequest, ValidatedJob
from ..loops import LoopJob, Step
from . import codec

MESSAGES: dict[str, tuple[str, Any]] = {
    "Job": (codec.JOB, Job),
    "ValidatedJob": (codec.VALIDATED_JOB, ValidatedJob),
    "InferenceBatch": (codec.BATCH, InferenceBatch),
    "LoopJob": (codec.LOOP_JOB, LoopJob),
    "Step": (codec.STEP, Step),
    "Outputs": (codec.OUTPUTS, list[Output]),
    "Event": (codec.EVENT, Event),
    "ReplayRequest": (codec.REPLAY, ReplayRequest),
}

# name: (address below the namespace, messages, description)
CHANNELS: dict[str, tuple[str, str, str]] = {
    "jobs": (
        "jobs.{priority}.{tenant}",
        "Job",
        "Publish a job here. Give it a Nats-Msg-Id, so that a retry is harmless.",
    ),
    "queue": ("queue.{priority}.{tenant}", "ValidatedJob", "Input of the queue stage."),
    "custom": (
        "{stage}.{priority}.{tenant}",
        "ValidatedJob",
        "Input of a custom stage. Consume, change the payload, publish it to the first subject in Penstock-Next with "
        "the others left in that header, keep Nats-Msg-Id, then acknowledge.",
    ),
    "batch": (
        "batch.{lanes}.{priority}.{tenant}",
        "ValidatedJob",
        "Where requests wait for a model; `lanes` is a hash of its name and revision.",
    ),
    "infer": ("infer.{worker}", "InferenceBatch", "Input of one worker."),
    "stream": ("stream.{partition}.{tenant}.{request}", "Outputs", "The engine's outputs for one request."),
    "tools": ("tools.{priority}.{tenant}", "LoopJob Step", "Responses to begin, and turns that have ended."),
    "events": ("events.{tenant}.{bridge}.{request}", "Event", "Read a request's events here, live or replayed."),
    "replay": (
        "control.replay.{tenant}.{bridge}.{request}",
        "ReplayRequest",
        'Ask here for the stored events of a request. The answer is {"events": [{"sequence": …, "event": …}, …]}, or '
        '{"error": …} as in the event `failed`.',
    ),
}


def json_schemas() -> dict[str, Any]:
    """JSON Schema (2020-12) of every message, by name, with shared definitions."""
    named = [(name, "serialization", TypeAdapter(kind)) for name, (_, kind) in MESSAGES.items()]
    references, definitions = TypeAdapter.json_schemas(named, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = dict(definitions.get("$defs", {}))
    for name in schemas.keys() - {"Job"}:  # all readers ignore unknown fields, but in a client's job
        schemas[name].pop("additionalProperties", None)
    for (name, _), schema in references.items():
        if schema != {"$ref": f"#/components/schemas/{name}"}:
            schemas[name] = schema
    return schemas


def asyncapi(namespace: str, version: str) -> dict[str, Any]:
    """The AsyncAPI document for one namespace."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for name, (address, messages, description) in CHANNELS.items():
        parameters: dict[str, Any] = {part: {} for part in _parameters(address)}
        channels[name] = {
            "address": f"{namespace}.{address}",
            "description": description,
            "parameters": parameters,
            "messages": {message: {"$ref": f"#/components/messages/{message}"} for message in messages.split()},
        }
        operations[f"use_{name}"] = {
            "action": "receive" if name == "jobs" else "send",
            "channel": {"$ref": f"#/channels/{name}"},
        }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Penstock", "version": version, "license": {"name": "Apache-2.0"}},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {
                name: {
                    "payload": {"$ref": f"#/components/schemas/{name}"},
                    "headers": {
                        "type": "object",
                        "properties": {
                            "Nats-Msg-Id": {"type": "string"},
                            "Penstock-Schema": {"const": schema},
                            "Penstock-Deadline": {"type": "string", "description": "Unix seconds"},
                            "Penstock-Next": {"type": "string", "description": "subjects ahead, nearest first"},
                            "Penstock-Hops": {"type": "string", "description": "stages so far, and when"},
                            "traceparent": {"type": "string"},
                        },
                    },
                }
                for name, (schema, _) in MESSAGES.items()
            },
            "schemas": json_schemas(),
        },
    }


def _parameters(address: str) -> list[str]:
    return [part[1:-1] for part in address.split(".") if part.startswith("{")]
