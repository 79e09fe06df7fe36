"""The span of a request at a worker, by OpenTelemetry's conventions for generative AI. No token has a span of its own.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.trace import Span

from ...config.tracing import link
from ...schemas.events import Delta, FinishReason
from ...schemas.gen_ai import request_attributes
from ...schemas.jobs import ValidatedJob


class InferSpan:
    """Tells the stage's span of one job what its worker does."""

    def __init__(self, span: Span, job: ValidatedJob, worker: str) -> None:
        self._span = span
        self._tokens = 0
        self._reasons: dict[int, FinishReason] = {}  # by choice
        span.set_attributes(request_attributes(job.endpoint, job.body) | {"penstock.worker": worker})
        span.set_attribute("gen_ai.response.model", job.served_name)
        span.set_attribute("gen_ai.response.id", job.id)
        span.set_attribute("gen_ai.usage.input_tokens", job.prompt_tokens)

    def taken_over(self, former: str | None, token: int) -> None:
        """This worker continues at that token, behind the one whose span `former` names."""
        link(self._span, former, "takeover")
        self._span.set_attribute("penstock.from_token", token)

    def published(self, deltas: Sequence[Delta]) -> None:
        """The deltas are stored."""
        count = sum(len(delta.token_ids) for delta in deltas)
        if count and not self._tokens:
            self._span.add_event("first_token")
        self._tokens += count
        for delta in deltas:
            if delta.finish_reason is not None:
                self._reasons[delta.choice] = delta.finish_reason
                self._span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
                reasons = [reason for _, reason in sorted(self._reasons.items())]
                self._span.set_attribute("gen_ai.response.finish_reasons", reasons)

    def preempted(self, choice: int, at: float, resumed: float) -> None:
        """The engine preempted a choice, and has resumed it, at these Unix seconds."""
        for event, time in (("preempted", at), ("resumed", resumed)):
            self._span.add_event(event, {"penstock.choice": choice}, timestamp=int(time * 1e9))
