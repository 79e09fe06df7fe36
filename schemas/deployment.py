"""The settings that all processes of a deployment share: those of its streams and of the pipeline."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

LAYOUT = 3  # version of subjects, streams and buckets; a process refuses to run with an unknown one


class Configuration(BaseModel):
    """The agreed configuration of a namespace, stored in the broker. All fields but `layout` are names of settings."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    layout: int = LAYOUT
    nats_replicas: int
    pipeline: tuple[str, ...]
    stream_partitions: int
    lease: float
    heartbeat_interval: float
    jobs_limit: int
    queue_limit: int
    tenant_limit: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    tenant_requests_per_minute: tuple[str, ...]
    tenant_tokens_per_minute: tuple[str, ...]
    infer_limit: int
    tools_limit: int
    batches_limit: int
    dead_limit: int
    dead_ttl: float
    files_ttl: float
    responses_ttl: float
    events_ttl: float
    events_limit: int
    store_limit: int
    max_models: int


SHARED = tuple(name for name in Configuration.model_fields if name != "layout")
