"""What all parts of a deployment share: the settings that shape its streams and the ways through them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

LAYOUT = 2  # of subjects, streams and buckets; a part refuses to work with one that it does not know


class Configuration(BaseModel):
    """One in each namespace, agreed in the broker. Its fields but `layout` are settings, by their names."""

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


SHARED = tuple(name for name in Configuration.model_fields if name != "layout")
