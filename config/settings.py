"""Every setting of Penstock: one flat, frozen object, built once. `sources.py` says where the values come from.

A field here is at once a flag (`--max-batch-size`), an environment variable (`PENSTOCK_MAX_BATCH_SIZE`) and a TOML key
(`max_batch_size`). Times are in seconds, sizes in bytes (`4GiB` is understood).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, ConfigDict, Field, field_validator

from ..schemas.jobs import TOKEN_PATTERN, Priority
from .api_keys import ApiKey
from .broker import BrokerSettings
from .directories import user_state
from .images import ImageSettings
from .models import ServedName, UrlPrefix, split_commas
from .plugins import PluginSettings
from .tenants import TenantSettings

BUILT_IN_STAGES = ("validate", "queue", "batch", "infer", "stream")
FAILOVER = 15.0  # seconds: an election takes 2 to 7, and a detector must be slower than that
LEAST_PARTITION_TTL = 4.0  # seconds
WebOrigin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
RESERVED = ("jobs", "events", "tools", "batches", "dead", "control")  # what else stands in a stage's place in subjects


def _hashed(value: object) -> object:
    entries = split_commas(value)
    return [str(ApiKey.parse(entry)) for entry in entries] if isinstance(entries, list) else entries


def _open(value: object) -> object:
    """None for the word auto, which leaves the choice to the engine."""
    return None if value == "auto" else value


def job_stages(pipeline: tuple[str, ...]) -> tuple[str, ...]:
    """The stages of a pipeline that have a work queue of their own name."""
    return pipeline[1 : pipeline.index("batch")]


class Settings(TenantSettings, BrokerSettings, PluginSettings, ImageSettings):
    """The effective configuration of one process."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    # Serving
    model: str | None = Field(None, min_length=1, description="Directory, GGUF file or Hugging Face id to serve.")
    host: str = Field("127.0.0.1", min_length=1, description="Address the HTTP bridge listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP bridge; 0 takes a free one.")
    grpc_port: int | None = Field(None, ge=0, le=65535, description="Port of gRPC (0: a free one); off without it.")
    served_model_name: ServedName | None = Field(
        None,
        description="Name under which clients ask for the model; by default its directory's or file's.",
    )
    max_body_size: ByteSize = Field(ByteSize(7 << 20), gt=0, description="Largest HTTP body; more is refused with 413.")
    body_timeout: float = Field(30.0, gt=0, description="How long a request's body may take to arrive; then 408.")
    max_header_size: ByteSize = Field(
        ByteSize(64 << 10),
        ge=1024,
        description="Largest line and headers of an HTTP request; more is refused with 431.",
    )
    header_timeout: float = Field(
        10.0, gt=0, description="How long the line and headers of a request may take to arrive; then 408."
    )
    idle_timeout: float = Field(75.0, gt=0, description="How long a connection stays open between two requests.")
    write_timeout: float = Field(
        30.0, gt=0, description="How long a client may leave a response unread; then its connection is closed."
    )
    max_connections: int = Field(4096, ge=1, description="Connections that may be open; more are refused with 503.")
    max_connections_per_address: int = Field(
        2048, ge=1, description="Connections that one address, or IPv6 network of 64 bits, may hold; a proxy is one."
    )
    strict: bool = Field(
        False, description="Refuse a request with unknown fields (400), instead of naming them in `Penstock-Ignored`."
    )
    api_keys: Annotated[tuple[str, ...] | None, BeforeValidator(_hashed)] = Field(
        None, min_length=1, description="KEY or TENANT=KEY, several with commas; without any, requests need no key."
    )
    api_keys_file: Path | None = Field(
        None, description="File of keys, one a line, as `penstock key` prints them; read again when it changes."
    )
    max_priority: Priority = Field(
        "high", description="Highest priority of HTTP requests whose API key has no max_priority of its own."
    )
    cors_origins: Annotated[tuple[WebOrigin, ...] | None, BeforeValidator(split_commas)] = Field(
        None,
        description="Web pages that may call the API from a browser, such as https://chat.example.org, or * for all. A "
        "server on a loopback address also answers to their hosts.",
    )
    file_limit: ByteSize = Field(ByteSize(512 << 20), gt=0, description="Largest file that may be uploaded.")
    tenant_quota: ByteSize = Field(
        ByteSize(4 << 30),
        gt=0,
        description="Most that a tenant may store: files, results of batches, responses and conversations.",
    )
    files_ttl: float = Field(30 * 86400.0, ge=3600, description="How long files and batches are stored.")
    responses_ttl: float = Field(30 * 86400.0, ge=60, description="How long responses and conversations are stored.")
    events_ttl: float = Field(
        600.0,
        ge=60,
        description="How long the outputs and events of a request are stored, so that it can be resumed and taken "
        "over; also the longest timeout of a request.",
    )
    events_limit: ByteSize = Field(
        ByteSize(256 << 20),
        ge=8 << 20,  # the largest message
        description="Size of the stored outputs and events of all requests; at most a quarter of store_limit.",
    )
    batch_concurrency: int = Field(128, ge=1, description="Requests of one batch that wait or run at the same time.")
    default_timeout: float = Field(600.0, gt=0, description="Deadline of a request that names none.")
    keepalive_interval: float = Field(15.0, gt=0, description="Silence on a stream after which a keep-alive is sent.")
    stop_delay: float = Field(0.0, ge=0, description="How long a bridge still serves after a stop signal, unready.")
    drain_timeout: float = Field(30.0, ge=0, description="How long running requests may continue after a stop signal.")
    state_dir: Path = Field(
        default_factory=user_state,
        description="Directory of what must survive a restart, such as the embedded broker's data.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: readable on a terminal, JSON elsewhere."
    )
    access_log: bool = Field(True, description="Log a line for each HTTP request, without its text.")
    show_prompts: bool = Field(False, description="Let operators read what clients wrote, in dead letters on the page.")
    canary_interval: float = Field(
        15.0, ge=0, description="Ask a model after so long without an answer, to know if requests succeed; 0: never."
    )
    otlp_endpoint: str | None = Field(
        None, description="Send traces to this OpenTelemetry collector, such as http://127.0.0.1:4318 (OTLP over HTTP)."
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Also serve this process's metrics here, for Prometheus, without a key."
    )

    # Pipeline
    pipeline: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = Field(
        BUILT_IN_STAGES,
        description="Order of the stages; custom ones stand between validate and batch, filters of answers between "
        "infer and stream.",
    )
    scheduling: Literal["round_robin", "least_loaded", "memory_aware", "prefix_aware"] = Field(
        "least_loaded", description="Which worker gets the next batch; `penstock scheduling` changes it at run time."
    )
    priority_ageing: float | None = Field(
        30.0,
        gt=0,
        description="Seconds of waiting that raise a request by one priority, so that low ones are served, too.",
    )
    jobs_limit: int = Field(
        1_000, ge=1, description="Jobs of each priority that may wait to be validated before publishers are refused."
    )
    queue_limit: int = Field(
        10_000, ge=1, description="Requests that may wait in each priority; more are refused with 503."
    )
    tenant_limit: int | None = Field(
        None,
        ge=1,
        description="Requests of one tenant that may wait in each priority, before 429; no limit by default.",
    )
    infer_limit: int = Field(
        10_000, ge=1, description="Requests that may run at the same time, on all workers; more wait in their lanes."
    )
    tools_limit: int = Field(10_000, ge=1, description="Steps of responses that may wait; more are refused with 503.")
    batches_limit: int = Field(10_000, ge=1, description="Batches that may wait or run; more are refused with 503.")
    dead_limit: int = Field(10_000, ge=1, description="Dead letters that are stored; new ones replace the oldest.")
    dead_ttl: float = Field(30 * 86400.0, ge=60, description="How long dead letters are stored.")
    high_watermark: float = Field(
        0.9, gt=0, le=1, description="Fraction of a queue's limit above which it accepts nothing."
    )
    low_watermark: float = Field(
        0.8, gt=0, lt=1, description="Fraction of the high watermark below which it accepts requests again."
    )
    batch_window: float = Field(0.0, ge=0, le=1, description="How long a job waits for other jobs to join its batch.")
    stream_partitions: int = Field(
        8, ge=1, le=256, description="Partitions of the output stream, shared by the copies of the stream stage."
    )
    lease: float = Field(5.0, ge=0.2, description="Seconds without a renewal after which a message is redelivered.")
    relay_interval: float = Field(
        0.04,
        ge=0,
        le=1,
        description="Least time between two messages of a stream; tokens in between are sent together. Each message "
        "takes time from a CPU that computes the model.",
    )
    stall_timeout: float = Field(
        30.0,
        gt=0,
        description="How long a worker may make no progress on a request whose turn it is: it then restarts the "
        "request, and ends it with an error the second time. If the engine as a whole makes no progress for so long, "
        "its worker is replaced.",
    )
    restart_after_requests: int | None = Field(
        None, ge=1, description="Requests after which a worker drains and is replaced; never by default."
    )
    restart_after_hours: float | None = Field(
        None, gt=0, description="Hours after which a worker drains and is replaced; never by default."
    )
    max_kills: int = Field(
        2, ge=1, description="Workers that may die while they begin a request alone before it goes to the dead letters."
    )
    max_attempts: int = Field(5, ge=1, description="Failures of a message before it goes to the dead letters.")
    heartbeat_interval: float = Field(1.0, gt=0, le=60, description="How often stages and workers send heartbeats.")

    # Tools
    mcp_config: Path | None = Field(
        None, description='MCP servers by name, in the JSON that MCP clients share: {"mcpServers": {…}}.'
    )
    mcp_allowed_urls: Annotated[tuple[UrlPrefix, ...], BeforeValidator(split_commas)] = Field(
        (), description="Prefixes of the URLs of MCP servers that requests may name; none by default."
    )
    tool_functions: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = Field(
        (), description="Python functions that models may call, as module:name or file.py:name."
    )
    tool_grants: Annotated[tuple[str, ...] | None, BeforeValidator(split_commas)] = Field(
        None,
        description="Which tenant may use which tools, as TENANT=SERVER, TENANT=SERVER/TOOL or TENANT=https://…, with "
        "* for all of either; without it every tenant may use all.",
    )
    tools_without_approval: Annotated[tuple[str, ...] | None, BeforeValidator(split_commas)] = Field(
        None,
        description="Tools that may run without approval, as SERVER, SERVER/TOOL, https://… or *; any other needs one, "
        "whatever a request says. Without it requests decide.",
    )
    secret_key: str | None = Field(
        None,
        min_length=16,
        repr=False,
        description="Key that encrypts the headers of requests for MCP servers; the same for all processes. By default "
        "`serve` makes a new one at each start.",
    )

    # Engine
    backend: str = Field(
        "paged",
        min_length=1,
        description="paged (the default), hf (transformers, for reference), llama_cpp (GGUF by llama.cpp), "
        "vllm, sentence_transformers (embeddings), echo (no model) or a plug-in's; see `penstock backends`.",
    )
    device: str = Field(
        "auto",
        min_length=1,
        description="auto, cpu, cuda:N or mps; `serve` and models also take several, as in cuda:0,cuda:1: each worker "
        "gets one of them. With auto these are all GPUs.",
    )
    dtype: Literal["bfloat16", "float32", "float16", "auto"] = Field(
        "bfloat16", description="bfloat16, float32, float16, or auto: the checkpoint's."
    )
    quantization: str | None = Field(
        None, min_length=1, description="int8 or int4: quantizes the weights while loading, for speed and memory."
    )
    attention: str = Field("auto", min_length=1, description="Attention implementation, where the backend has several.")
    max_batch_size: Annotated[int | None, BeforeValidator(_open)] = Field(
        None, ge=1, description="Requests that run together; auto, the default: as many as memory and cores allow."
    )
    max_sequence_length: int | None = Field(None, ge=2, description="Context length; the model's own by default.")
    kv_cache_memory: Annotated[ByteSize | None, BeforeValidator(_open)] = Field(
        None, gt=0, description="Memory for keys and values; auto, the default: sized by the machine and the model."
    )
    enable_chunked_prefill: bool | None = Field(
        None, description="Compute long prompts in pieces, between which streams continue; on by default for paged."
    )
    prefill_chunk_size: int | None = Field(
        None, ge=1, description="Tokens of a piece, and at most of a step; by default 256 on a CPU, 2048 on a GPU."
    )
    enable_cuda_graph: bool | None = Field(None, description="Replay decoding steps as CUDA graphs; on by default.")
    compile_kernels: bool = Field(True, description="Compile kernels for decoding on this CPU at the first start.")
    speculation: Literal["auto", "off"] = Field(
        "auto",
        description="auto: guess tokens that the grammar or earlier text suggests, and compute several in a step where "
        "that changes no answer and pays; off: never.",
    )
    speculation_depth: int = Field(12, ge=1, le=64, description="The most tokens guessed for a choice in a step.")
    prefix_cache_dir: Path | None = Field(
        None,
        description="Directory that keeps cached prefixes over a restart, for all workers of this machine; none by "
        "default. Its files hold what prompts and answers said.",
    )
    prefix_cache_limit: ByteSize = Field(
        ByteSize(10 << 30), gt=0, description="Size of that directory; what was used least recently is removed."
    )
    cache_answers: bool = Field(False, description="Answer identical greedy requests from memory.")
    threads: int | None = Field(
        None, ge=1, description="The most CPU threads of a worker; by default all cores, shared among --workers."
    )
    echo_rate: float = Field(0.0, ge=0, description="Tokens a second and request of the echo backend; 0: no limit.")
    workers: int = Field(1, ge=1, le=64, description="Worker processes that `serve` starts.")

    @field_validator("pipeline")
    @classmethod
    def _stages_in_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({name.lower() for name in value}) != len(value):
            raise ValueError("a stage is listed twice")
        if tuple(name for name in value if name in BUILT_IN_STAGES) != BUILT_IN_STAGES:
            raise ValueError(f"must hold {', '.join(BUILT_IN_STAGES)} in this order")
        if value[0] != "validate" or value[-1] != "stream" or value.index("infer") != value.index("batch") + 1:
            raise ValueError("custom stages stand between validate and batch, filters between infer and stream")
        if bad := [name for name in value if not re.fullmatch(TOKEN_PATTERN, name)]:
            raise ValueError(f"{', '.join(map(repr, bad))}: use only letters, digits, '_' and '-'")
        if taken := [name for name in value if name in RESERVED]:
            raise ValueError(f"{', '.join(taken)}: reserved name; choose another")
        return value

    @property
    def failover(self) -> float:
        """Seconds in which a cluster may elect a leader, and no heartbeat can be sent; 0 without one."""
        return FAILOVER if self.nats_replicas > 1 else 0.0

    @property
    def worker_ttl(self) -> float:
        """Seconds without a heartbeat after which a worker counts as dead."""
        return max(3 * self.heartbeat_interval, self.failover)

    @property
    def partition_ttl(self) -> float:
        """Seconds without a renewal after which a partition of the stream stage is free."""
        return max(LEAST_PARTITION_TTL, self.failover)

    @property
    def longest_timeout(self) -> float:
        """The longest timeout of a request, in seconds: its events, which a takeover needs, are stored no longer."""
        return self.events_ttl

    @property
    def job_stages(self) -> tuple[str, ...]:
        """The stages after validate that take one job at a time from a work queue of their own name."""
        return job_stages(self.pipeline)

    @property
    def filters(self) -> tuple[str, ...]:
        """The filters between infer and stream, in order."""
        return self.pipeline[self.pipeline.index("infer") + 1 : -1]
