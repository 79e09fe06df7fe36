"""Refuses requests that a backend can never serve, before anything runs."""

from __future__ import annotations

from ..schemas.errors import GenerationFailed, InvalidRequest
from ..schemas.params import GenerationParams
from .backend import Backend
from .backends.embedding import EmbeddingBackend
from .request import EmbeddingInput, EngineRequest, check_input, check_request


def check_supported(request: EngineRequest, backend: Backend) -> None:
    """Raise `InvalidRequest` for a request that `backend` can never serve, and `GenerationFailed` for an answer that
    another worker began and `backend` cannot continue."""
    check_mode(request, backend)
    if isinstance(request, EmbeddingInput):
        _check_embedding(request, backend)
        return
    check_request(request, backend.info)
    check_images(request, backend)
    check_parameters(request.params, backend)
    _check_resume(request, backend)


def check_mode(request: EngineRequest, backend: Backend) -> None:
    """Raise `InvalidRequest` unless `backend` makes what is asked for: text or vectors."""
    name, modes = backend.manifest.id, backend.manifest.modes
    if isinstance(request, EmbeddingInput):
        if "embeddings" not in modes or not isinstance(backend, EmbeddingBackend):
            raise InvalidRequest(
                f"the backend {name!r} cannot embed; start a worker with --backend sentence_transformers for that",
                code="unsupported_capability",
            )
    elif "text" not in modes:
        raise InvalidRequest(
            f"the backend {name!r} serves only embeddings; call embed, or use another backend",
            code="unsupported_capability",
        )


def check_images(request: EngineRequest, backend: Backend) -> None:
    """Raise `InvalidRequest` for images that the model or `backend` does not see, or that do not lie in the prompt."""
    if not request.images:
        return
    if "images" not in backend.manifest.modes or not backend.info.sees:
        raise InvalidRequest(
            f"{backend.info.source} takes text alone with the backend {backend.manifest.id!r}; leave the images out",
            code="unsupported_capability",
        )
    most, count = backend.info.most_images, len({image.identity for image in request.images})
    if most is not None and count > most:
        raise InvalidRequest(
            f"The request has {count} images, and a worker of {backend.info.source} has room for {most} at a time; "
            "send fewer, or start it with a larger --kv-cache-memory.",
            code="too_many_images",
            param="messages",
        )
    if backend.info.image_token is not None and request.params.prompt_logprobs is not None:
        raise InvalidRequest(
            f"{backend.info.source} has no scores for the tokens of images; leave prompt_logprobs out, or the images",
            code="unsupported_parameter",
            param="prompt_logprobs",
        )
    end = 0
    for image in request.images:
        if not end <= image.offset < image.end <= len(request.prompt):
            raise InvalidRequest("The images do not lie in the prompt, in its order; prepare the request again.")
        end = image.end


def check_parameters(params: GenerationParams, backend: Backend) -> None:
    """Raise `InvalidRequest` for parameters that `backend` does not honour."""
    unsupported = params.model_fields_set - backend.manifest.parameters
    if refused := sorted(
        name
        for name in unsupported
        if getattr(params, name) != GenerationParams.model_fields[name].get_default(call_default_factory=True)
    ):
        raise InvalidRequest(
            f"the backend {backend.manifest.id!r} does not support {', '.join(refused)}; leave it out",
            code="unsupported_parameter",
            param=refused[0],
        )


def lacks(request: EngineRequest, backend: Backend) -> str:
    """What `backend` lacks for a request, as a sentence; empty if nothing."""
    try:
        check_mode(request, backend)
        if not isinstance(request, EmbeddingInput):
            check_parameters(request.params, backend)
            check_images(request, backend)
    except InvalidRequest as error:
        return str(error)
    if request.adapter is not None and not backend.manifest.adapters:
        return f"the backend {backend.manifest.id!r} runs no adapters"
    return ""


def _check_resume(request: EngineRequest, backend: Backend) -> None:
    resume, name = backend.manifest.resume, backend.manifest.id
    if not any(request.generated) or resume == "exact" or (resume == "greedy" and request.params.temperature == 0):
        return
    reach = "only answers at temperature 0" if resume == "greedy" else "no answers"
    raise GenerationFailed(
        f"The worker of this request has ended, and the backend {name!r} continues {reach} of another one; "
        "send the request again."
    )


def _check_embedding(request: EmbeddingInput, backend: Backend) -> None:
    assert isinstance(backend, EmbeddingBackend)
    info, most = backend.info, backend.embedding_size
    if request.dimensions is not None and not 1 <= request.dimensions <= most:
        raise InvalidRequest(f"dimensions is {request.dimensions}; use a number from 1 to {most}.", param="dimensions")
    path = f"input[{request.first_choice}]"
    check_input(request.prompt, path, context_length=info.context_length, vocabulary_size=info.vocabulary_size)
