"""Refuses requests that a backend can never serve, before anything runs."""

from __future__ import annotations

from ..schemas.errors import InvalidRequest
from ..schemas.params import GenerationParams
from .backend import Backend
from .backends.embedding import EmbeddingBackend
from .request import EmbeddingInput, EngineRequest, check_input, check_request


def check_supported(request: EngineRequest, backend: Backend, name: str) -> None:
    """Raise `InvalidRequest` for a request that `backend`, called `name`, can never serve."""
    if isinstance(request, EmbeddingInput):
        _check_embedding(request, backend, name)
        return
    if not backend.capabilities.text:
        raise InvalidRequest(
            f"the backend {name!r} serves only embeddings; call embed, or use another backend",
            code="unsupported_capability",
        )
    check_request(request, backend.info)
    check_parameters(request.params, backend, name)


def check_parameters(params: GenerationParams, backend: Backend, name: str) -> None:
    """Raise `InvalidRequest` for parameters that `backend`, called `name`, does not honour."""
    unsupported = params.model_fields_set - backend.capabilities.parameters
    if refused := sorted(
        name
        for name in unsupported
        if getattr(params, name) != GenerationParams.model_fields[name].get_default(call_default_factory=True)
    ):
        raise InvalidRequest(
            f"the backend {name!r} does not support {', '.join(refused)}; leave it out",
            code="unsupported_parameter",
            param=refused[0],
        )


def _check_embedding(request: EmbeddingInput, backend: Backend, name: str) -> None:
    if not isinstance(backend, EmbeddingBackend):
        raise InvalidRequest(
            f"the backend {name!r} cannot embed; start a worker with --backend sentence_transformers for that",
            code="unsupported_capability",
        )
    info, most = backend.info, backend.embedding_size
    if request.dimensions is not None and not 1 <= request.dimensions <= most:
        raise InvalidRequest(f"dimensions is {request.dimensions}; use a number from 1 to {most}.", param="dimensions")
    path = f"input[{request.first_choice}]"
    check_input(request.prompt, path, context_length=info.context_length, vocabulary_size=info.vocabulary_size)
