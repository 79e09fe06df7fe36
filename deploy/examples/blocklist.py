"""A stage of your own: refuses prompts that hold a blocked word, and passes the rest on.

export PENSTOCK_PIPELINE=validate,blocklist,queue,batch,infer,stream
penstock serve MODEL &
BLOCKED_WORDS=mellon,sesame penstock stage deploy/examples/blocklist.py:Blocklist
"""

from __future__ import annotations

import os
import re

from penstock.schemas.errors import StartupError
from penstock.schemas.openai.completions import ChatRequest, parse_request
from penstock.stages import InvalidRequest, JobStage, Pipe, ValidatedJob


class Blocklist(JobStage):
    """Looks for whole words, in any case, in every message or prompt."""

    name = "blocklist"

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        words = [word.strip() for word in os.environ.get("BLOCKED_WORDS", "").split(",") if word.strip()]
        if not words:
            raise StartupError("name the words to block, with commas between, in BLOCKED_WORDS")
        self._blocked = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)", re.IGNORECASE)

    async def process(self, job: ValidatedJob) -> ValidatedJob:
        if any(self._blocked.search(text) for text in _texts(job)):
            raise InvalidRequest("The prompt holds a blocked word.", code="content_policy")
        return job


def _texts(job: ValidatedJob) -> list[str]:
    request = parse_request(job.endpoint, job.body)
    if isinstance(request, ChatRequest):
        return [message.text for message in request.messages]
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    if not texts:
        raise InvalidRequest("Send the prompt as text: token ids cannot be checked.", code="content_policy")
    return texts
