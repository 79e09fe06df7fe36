"""Turns a request for embeddings into the token ids of its inputs."""

from __future__ import annotations

from ...schemas.errors import InvalidRequest
from ...schemas.openai.embeddings import MAX_INPUTS, MAX_TOKENS, EmbeddingRequest
from ..request import check_input
from ..text.tokenizer_port import TokenizerLike, encode_within


def prepare_inputs(
    request: EmbeddingRequest, tokenizer: TokenizerLike, *, context_length: int, name: str
) -> list[list[int]]:
    """The token ids of every input; `name` is the model's, for error messages. Raises `InvalidRequest`."""
    inputs = request.prompts
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"The request has {len(inputs)} inputs; send at most {MAX_INPUTS}.", param="input")
    prompts = []
    for index, text in enumerate(inputs):
        path = "input" if len(inputs) == 1 else f"input[{index}]"
        if not text or (isinstance(text, str) and not text.strip()):
            raise InvalidRequest(f"The input {path} is blank; send some text.", code="empty_prompt", param=path)
        prompts.append(encode_within(tokenizer, text, context_length, path) if isinstance(text, str) else text)
        check_input(prompts[-1], path, context_length=context_length, vocabulary_size=tokenizer.vocabulary_size)
    if (total := sum(map(len, prompts))) > MAX_TOKENS:
        raise InvalidRequest(
            f"The inputs have {total} tokens together; send {name} at most {MAX_TOKENS} a request.", param="input"
        )
    return prompts
