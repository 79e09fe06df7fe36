"""The manifests of Penstock's own backends. Imports no torch."""

from __future__ import annotations

from ...schemas.params import GenerationParams
from .manifest import INTERFACE, Manifest

_ALL = frozenset(GenerationParams.model_fields)

PAGED = Manifest(
    id="paged",
    interface=INTERFACE,
    backend="penstock.engine.paged.backend:PagedBackend",
    licence="Apache-2.0",
    formats=("safetensors", "gguf"),
    devices=("cpu", "cuda", "mps"),
    modes=("text", "images"),
    resume="exact",
    adapters=True,
    cache=True,
)
HF = Manifest(
    id="hf",
    interface=INTERFACE,
    backend="penstock.engine.backends.hf:HfBackend",
    licence="Apache-2.0",
    formats=("safetensors", "gguf"),
    devices=("cpu", "cuda", "mps"),
    modes=("text",),
    resume="exact",
    parameters=_ALL - {"prompt_logprobs"},
    adapters=True,
    cache=True,
)
LLAMA_CPP = Manifest(
    id="llama_cpp",
    interface=INTERFACE,
    backend="penstock.engine.llama_cpp.backend:LlamaCppBackend",
    licence="Apache-2.0",
    formats=("gguf",),
    devices=("cpu",),
    modes=("text",),
    resume="exact",
    cache=True,
    expands=False,
    requires=("llama_cpp",),
    install="pip install 'penstock[llama-cpp]'",
)
VLLM = Manifest(
    id="vllm",
    interface=INTERFACE,
    backend="penstock.engine.vllm.backend:VllmBackend",
    licence="Apache-2.0",
    formats=("safetensors",),
    devices=("cpu", "cuda"),
    modes=("text",),
    resume="greedy",
    parameters=_ALL - {"logits_processors"},
    cache=True,
    options=True,
    requires=("vllm",),
    install="pip install 'penstock[vllm]'",
)
ECHO = Manifest(
    id="echo",
    interface=INTERFACE,
    backend="penstock.engine.backends.echo:EchoBackend",
    licence="Apache-2.0",
    formats=(),
    devices=("cpu",),
    modes=("text",),
    resume="exact",
    parameters=_ALL - {"grammar", "logits_processors"},
)
SENTENCE_TRANSFORMERS = Manifest(
    id="sentence_transformers",
    interface=INTERFACE,
    backend="penstock.engine.backends.sentence_transformer:SentenceTransformerBackend",
    licence="Apache-2.0",
    formats=("safetensors",),
    devices=("cpu", "cuda", "mps"),
    modes=("embeddings", "scores"),
    resume="exact",
    parameters=frozenset(),
    requires=("sentence_transformers",),
    install="pip install 'penstock[embeddings]'",
)
