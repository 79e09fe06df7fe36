"""Tools of OpenAI's that clients run, in the whole pipeline: calls arrive as their items, results reach the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from agents import Agent, ApplyPatchTool, RunConfig, Runner, ShellTool
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from agents.models.openai_responses import OpenAIResponsesModel
from agents.tool import ShellCommandOutput, ShellCommandRequest, ShellResult
from office import Office, call, functions, kinds, said
from responses_rules import read_events
from serving import Served

UNTRACED = RunConfig(tracing_disabled=True)
LISTED: Any = {"commands": ["ls", "pwd"], "timeout_ms": 500}
PROGRAM: Any = {"command": ["ls", "-l"], "env": {"A": "b"}}
PATCH: Any = {"type": "update_file", "path": "a.txt", "diff": "@@\n-old\n+new"}
RESULTS: Any = {
    "shell": [
        {
            "type": "shell_call_output",
            "output": [
                {"stdout": "FOUND", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        }
    ],
    "local_shell": [{"type": "local_shell_call_output", "output": '{"stdout": "FOUND"}'}],
    "apply_patch": [{"type": "apply_patch_call_output", "status": "failed", "output": "FOUND nothing"}],
}
CHOICES: Any = {name: {"type": name} for name in ("shell", "apply_patch")} | {"local_shell": "required"}
CALLS = [("shell", LISTED), ("local_shell", PROGRAM), ("apply_patch", PATCH)]


@pytest.fixture(scope="module")
def office() -> Iterator[Office]:
    with asyncio.Runner() as runner:
        office = Office(runner)
        yield office
        office.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tool", "arguments"), CALLS)
def test_a_call_arrives_as_its_item_and_its_result_reaches_the_model(
    office: Office, tool: str, arguments: Any, stream: bool
) -> None:
    office.model.asked.clear()
    asked: Any = {"tools": [{"type": tool}], "stream": stream}
    made = office.create(call(tool, **arguments), input="Go.", tool_choice=CHOICES[tool], **asked)
    assert (made["status"], kinds(made)) == ("completed", [f"{tool}_call"])
    assert office.stored(made["id"]) == made
    [item] = made["output"]
    shown = item["operation" if tool == "apply_patch" else "action"]
    assert {name: shown[name] for name in arguments} == arguments and item["status"] == "completed"
    [result] = RESULTS[tool]
    named = {"id": item["call_id"]} if tool == "local_shell" else {"call_id": item["call_id"]}
    more = office.create("Well.", input=[result | named], previous_response_id=made["id"], **asked)
    assert said(more) == "Well."
    first, second = office.model.asked
    assert tool in first, "the model is told of the tool"
    for text in ("FOUND", "ls" if tool != "apply_patch" else "a.txt"):
        assert text in second
    assert second.index("a.txt" if tool == "apply_patch" else '"ls"') < second.index("FOUND")
    named = {"id": item["id"]} if tool == "local_shell" else named  # clients name the call, or its item
    history: Any = [{"role": "user", "content": "Go."}, *made["output"], result | named]
    alone = office.create("Well.", input=history, **asked)
    assert said(alone) == "Well." and office.model.asked[2] == second, "whoever keeps the history gets the same"


def test_commands_arrive_in_events_of_their_own(office: Office) -> None:
    body: Any = {"model": "echo", "input": "Go.", "tools": [{"type": "shell"}], "stream": True}
    office.model.texts = [call("shell", **LISTED)]
    events = read_events(office.ask("POST", "/v1/responses", body).body)
    told = [(event["type"].rpartition(".")[2], event["command_index"]) for event in events if "command_index" in event]
    assert told == [(kind, index) for index in range(2) for kind in ("added", "delta", "done")]
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert (added["status"], added["action"]["commands"]) == ("in_progress", [])


def test_a_call_that_is_cut_off_or_odd_arrives_as_the_model_wrote_it(office: Office) -> None:
    tools = [{"type": "apply_patch"}]
    cut = office.create(call("apply_patch", **PATCH), input="Go.", tools=tools, max_output_tokens=25, stream=True)
    assert (cut["status"], kinds(cut)) == ("incomplete", ["function_call"])
    odd = office.create(call("apply_patch", type="delete_file", path=""), input="Go.", tools=tools, stream=True)
    [item] = odd["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "apply_patch", "completed")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "there is no path"}
    assert said(office.create("I see.", input=[output], previous_response_id=odd["id"], tools=tools)) == "I see."


def test_a_call_beside_one_of_penstocks_ends_the_response(office: Office) -> None:
    tools = [*functions(), {"type": "shell"}]
    made = office.create(call("add", a=2, b=3) + call("shell", **LISTED), input="Go.", tools=tools, stream=True)
    assert (made["status"], kinds(made)) == ("completed", ["mcp_list_tools", "mcp_call", "shell_call"])


def test_a_result_without_its_call_is_refused(office: Office) -> None:
    for [result] in RESULTS.values():
        given = {"id": "none"} if result["type"].startswith("local") else {"call_id": "none"}
        error = office.refused(400, input=[result | given])
        assert (error["param"], "no call before it has the id 'none'" in error["message"]) == ("input[0].call_id", True)


def test_items_are_kept_in_conversations(office: Office) -> None:
    kept: Any = json.loads(office.ask("POST", "/v1/conversations", {}).body)
    made = office.create(call("shell", **LISTED), input="Go.", tools=[{"type": "shell"}], conversation=kept["id"])
    [result] = RESULTS["shell"]
    result = result | {"call_id": made["output"][0]["call_id"]}
    more = office.create("Well.", input=[result], conversation=kept["id"], tools=[{"type": "shell"}])
    assert said(more) == "Well."
    listed = json.loads(office.ask("GET", f"/v1/conversations/{kept['id']}/items?order=asc").body)["data"]
    assert [item["type"] for item in listed] == ["message", "shell_call", "shell_call_output", "message"]


class Editor:
    """Notes what it is to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None]] = []

    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        return self._noted(operation)

    def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        return self._noted(operation)

    def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        return self._noted(operation)

    def _noted(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        self.asked.append((operation.type, operation.path, operation.diff))
        return ApplyPatchResult(output="PATCHED")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_openais_sdk_runs_commands_and_patches_files(office: Office, stream: bool) -> None:
    """Both tools in one turn, as the SDK calls them and answers."""
    office.model.asked.clear()
    office.model.texts = [call("shell", **LISTED) + call("apply_patch", **PATCH), "All done."]
    editor, ran = Editor(), list[str]()

    def execute(request: ShellCommandRequest) -> ShellResult:
        ran.extend(request.data.action.commands)
        return ShellResult([ShellCommandOutput(stdout=f"RAN {command}") for command in request.data.action.commands])

    async def work() -> str:
        transport = httpx2.ASGITransport(app=office.apps[0])
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=httpx2.AsyncClient(transport=transport)
        ) as client:
            agent = Agent(
                "worker",
                model=OpenAIResponsesModel("echo", client),
                tools=[ShellTool(executor=execute), ApplyPatchTool(editor=editor)],
            )
            if not stream:
                return str((await Runner.run(agent, "Work.", run_config=UNTRACED)).final_output)
            result = Runner.run_streamed(agent, "Work.", run_config=UNTRACED)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    assert office.run(work()) == "All done."
    assert ran == LISTED["commands"] and editor.asked == [(PATCH["type"], PATCH["path"], PATCH["diff"])]
    for text in ("RAN ls", "RAN pwd", "PATCHED"):
        assert text in office.model.asked[1]


@pytest.mark.parametrize("tool", ["shell", "local_shell", "apply_patch"])
def test_the_official_client_gets_what_a_random_model_writes(tool_server: Served, tool: str) -> None:
    """The grammar holds the model to what the tool takes, unless it does not come to an end."""
    with openai.OpenAI(
        base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        tools: Any = [{"type": tool}]
        choice: Any = {"type": "allowed_tools", "mode": "required", "tools": tools}
        *events, last = client.responses.create(
            model="tools",
            input="Do it",
            tools=tools,
            tool_choice=choice,
            max_output_tokens=400,
            temperature=0.5,
            stream=True,
            extra_body={"seed": 1},
        )
    assert events and last.type in ("response.completed", "response.incomplete")
    assert last.response.output
    for item in last.response.output:
        assert item.type == (f"{tool}_call" if getattr(item, "status", "") == "completed" else "function_call")
