"""OpenAI's Agents SDK against the server: tools run, results go back, an object comes out."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from pydantic import BaseModel
from serving import Served


class Weather(BaseModel):
    sky: Literal["clear", "cloudy"]
    wind: Literal["calm", "strong"]


@pytest.mark.filterwarnings("ignore")  # the SDK's own
async def test_an_agent_calls_a_tool_and_answers_in_its_form(tool_server: Served) -> None:
    asked: list[str] = []

    @function_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "clear and calm"

    async with openai.AsyncOpenAI(base_url=f"{tool_server.url}/v1", api_key="none") as client:
        agent = Agent(
            name="Forecaster",
            instructions="Tell the weather.",
            model=OpenAIChatCompletionsModel(model="tools", openai_client=client),
            model_settings=ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=300, extra_body={"seed": 1}
            ),
            tools=[weather],
            output_type=Weather,
        )
        result = await Runner.run(
            agent, "What is it like in Rome?", max_turns=20, run_config=RunConfig(tracing_disabled=True)
        )
        assert asked and asked[0] in ("Oslo", "Rome")
        assert isinstance(result.final_output, Weather)

        streamed = Runner.run_streamed(agent, "And in Oslo?", max_turns=20, run_config=RunConfig(tracing_disabled=True))
        kinds = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        assert isinstance(streamed.final_output, Weather)
