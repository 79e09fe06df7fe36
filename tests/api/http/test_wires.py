"""P13 to P15 as clients read them: as OpenAI's SSE, and as events from `/generate` and `/v1/streams`."""

from __future__ import annotations

from typing import Any

import pytest
from applications import Applications
from asgi import ask, messages
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = settings(max_examples=100, deadline=None)
PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/streams"])

# Text that the echo model gives back as it is: whatever is not one of its special tokens.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda text: text.strip() and "<|" not in text
)


class Read:
    """One stream, as its client reads it, whichever wire it came by."""

    def __init__(self, applications: Applications, path: str, **body: Any) -> None:
        applications.pipeline.backend._rate = 0.0
        self.is_openai = path == "/v1/completions"
        body = {"model": "echo", "stream": True, **body}
        if self.is_openai:
            body["stream_options"] = {"include_usage": True}
        response = applications.run(
            ask(applications.apps[0], "POST", "/v1/completions" if self.is_openai else "/generate", body)
        )
        self.status = response.status
        if path == "/v1/streams":
            request = response.headers["x-request-id"]
            response = applications.run(ask(applications.apps[1], "GET", f"{path}/{request}"))
        self.sent = [message.data for message in messages(response.body)]
        self.is_done = self.sent[-1] == "[DONE]" if self.is_openai else self.sent[-1]["type"] == "done"

    def pieces(self, choice: int) -> list[dict[str, Any]]:
        """Of one choice: what there is of `text`, `logprobs` and `finish_reason`."""
        if self.is_openai:
            chunks = [data for data in self.sent if isinstance(data, dict)]
            return [each for chunk in chunks for each in chunk.get("choices", ()) if each["index"] == choice]
        return [data for data in self.sent if data["type"] == "token" and data["choice"] == choice]

    @property
    def usage(self) -> dict[str, int]:
        found: dict[str, int] = self.sent[-2 if self.is_openai else -1]["usage"]
        return found

    @property
    def error(self) -> dict[str, Any]:
        (error,) = [data["error"] for data in self.sent if isinstance(data, dict) and data.get("error")]
        assert isinstance(error, dict)
        return error


@PATHS
def test_p13_token_events_carry_text_index_and_logprobs(applications: Applications, path: str) -> None:
    """P13: a token event carries the token text, its index and, where asked, its logprob."""

    @EXAMPLES
    @given(prompt=texts, logprobs=st.none() | st.integers(0, 3), n=st.integers(1, 3))
    def check(prompt: str, logprobs: int | None, n: int) -> None:
        read = Read(applications, path, prompt=prompt, logprobs=logprobs, n=n)
        for choice in range(n):
            pieces = read.pieces(choice)
            assert "".join(piece["text"] for piece in pieces) == prompt
            assert all((piece["logprobs"] is None) == (logprobs is None) for piece in pieces)
            said = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
            if read.is_openai:
                count = sum(len(each["tokens"]) for each in said)
                assert count == sum(len(each["token_logprobs"]) for each in said)
                assert [each for one in said for each in one["text_offset"]][:1] == [0] * bool(said)
            else:
                count = sum(map(len, said))
                place = 0
                for piece in pieces:
                    assert piece["index"] == place
                    place += len(piece["token_ids"])
                assert logprobs is None or count == place
            assert logprobs is None or count == len(prompt.encode()) + 1  # the end is a token, too

    check()


@PATHS
def test_p14_the_last_event_carries_reasons_and_usage(applications: Applications, path: str) -> None:
    """P14: the last event carries the finish reason and the three usage counts."""

    @EXAMPLES
    @given(prompt=texts, limit=st.integers(1, 60), n=st.integers(1, 3))
    def check(prompt: str, limit: int, n: int) -> None:
        read = Read(applications, path, prompt=prompt, max_tokens=limit, n=n)
        length = len(prompt.encode())
        wanted = "stop" if limit > length else "length"
        for choice in range(n):
            reasons = [piece["finish_reason"] for piece in read.pieces(choice)]
            assert reasons == [None] * (len(reasons) - 1) + [wanted]
        assert read.is_done
        completion = n * min(limit, length + 1)
        counts = {"prompt_tokens": length, "completion_tokens": completion, "total_tokens": length + completion}
        assert read.usage.items() >= counts.items()

    check()


@PATHS
def test_p15_an_error_during_generation_reaches_the_client(applications: Applications, path: str) -> None:
    """P15: an error during generation reaches the client as an event with message and code before the stream closes."""

    @EXAMPLES
    @given(prompt=texts, after=st.integers(0, 5))
    def check(prompt: str, after: int) -> None:
        applications.pipeline.backend.fails_after = after
        try:
            read = Read(applications, path, prompt=prompt, ignore_eos=True, max_tokens=50)
        finally:
            applications.pipeline.backend.fails_after = None
        assert read.status == 200 or (read.is_openai and read.status == 500)
        if read.status == 200:
            assert read.error["message"] and read.error["code"] == "generation_failed"
            assert not read.is_done

    check()
