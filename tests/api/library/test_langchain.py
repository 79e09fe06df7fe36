"""LangChain's own integration tests for chat models, against a server whose model speaks by chance."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from serving import Served

BY_CHANCE = "what this model calls, and with what, is chance"


@pytest.mark.filterwarnings("ignore")  # LangChain's own
class TestLangChain(ChatModelIntegrationTests):
    url = ""
    clients: dict[str, Any]  # LangChain's own outlive their event loops, and are never closed

    @pytest.fixture(autouse=True)
    async def _server(self, tool_server: Served) -> AsyncIterator[None]:
        type(self).url = f"{tool_server.url}/v1"
        with httpx2.Client() as client:
            async with httpx2.AsyncClient() as async_client:
                type(self).clients = {"http_client": client, "http_async_client": async_client}
                yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "tools",
            "base_url": self.url,
            "api_key": "none",
            "seed": 1,  # or else, once in many runs, the first token ends the answer
            "max_tokens": 1500,
            "stream_usage": True,
            "model_kwargs": {"parallel_tool_calls": False},  # by chance it would ask for several things at once
            **self.clients,
        }

    @pytest.mark.xfail(reason=BY_CHANCE, strict=True)
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @pytest.mark.xfail(reason=BY_CHANCE, strict=True)
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @pytest.mark.xfail(reason=BY_CHANCE, strict=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason=BY_CHANCE, strict=True)
    def test_unicode_tool_call_integration(self, model: BaseChatModel, **options: Any) -> None:
        super().test_unicode_tool_call_integration(model, **options)
