"""The pictures of the pipeline: their boxes are the stages, and their arrows the subjects that requests travel on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from memory_pipeline import Pipeline
from pages import ROOT, blocks, named

from penstock.config.settings import BUILT_IN_STAGES, Settings
from penstock.stages.catalogue import LIGHT
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.nats.administration.deployment import layout
from penstock.streams.port import Headers, Published
from penstock.streams.topology import Subjects, model_lanes

WHOLE = ROOT / "docs" / "architecture.md"
PICTURES = [ROOT / "README.md", WHOLE]


class Arrow(NamedTuple):
    source: str
    address: str
    target: str


def arrows(page: Path) -> list[Arrow]:
    """The arrows with a subject, in order."""
    (picture,) = blocks(page, "mermaid")
    return [
        Arrow(source, address, target)
        for source, address, target in re.findall(r"^ *(\w+) -\.?->\|\"([^\"]+)\"\| (\w+)", picture.code, re.MULTILINE)
    ]


def path(page: Path) -> list[Arrow]:
    """From the bridge through the pipeline and back, by the first arrow of each box that leads on."""
    found: list[Arrow] = []
    place = "bridge"
    while not found or place != "bridge":
        ahead = (*BUILT_IN_STAGES[len(found) :], "bridge")
        step = next(arrow for arrow in arrows(page) if arrow.source == place and arrow.target in ahead)
        found.append(step)
        place = step.target
    return found


@pytest.mark.parametrize("page", PICTURES, ids=named)
def test_the_main_path_goes_through_the_stages_in_order(page: Path) -> None:
    assert tuple(arrow.target for arrow in path(page)) == (*BUILT_IN_STAGES, "bridge")


@pytest.mark.parametrize("page", PICTURES, ids=named)
async def test_a_request_travels_as_drawn(page: Path) -> None:
    pipeline = await Pipeline.start(memory=Watched)
    try:
        await pipeline.events({"model": "echo", "prompt": "hello"})
        assert isinstance(pipeline.pipe.broker, Watched)
        travelled = pipeline.pipe.broker.families
    finally:
        await pipeline.stop()
    drawn = [arrow.address.partition(".")[0] for arrow in path(page)]
    assert drawn[-1] in travelled  # whose first message, `accepted`, comes early
    assert [family for family in travelled if family != drawn[-1]] == drawn[:-1]


@pytest.mark.parametrize("page", PICTURES, ids=named)
def test_boxes_are_stages_and_arrows_streams(page: Path) -> None:
    known = {*BUILT_IN_STAGES, *LIGHT, "bridge", "program", "dead"}
    assert {name for arrow in arrows(page) for name in (arrow.source, arrow.target)} <= known
    streams = (*layout(Settings()).streams, *model_lanes("p", "lanes"))
    there = {spec.subjects[0].split(".")[1] for spec in streams}
    drawn = {arrow.address.partition(".")[0] for arrow in arrows(page)}
    assert drawn <= there
    assert page != WHOLE or drawn == there


@pytest.mark.parametrize("page", PICTURES, ids=named)
def test_every_address_is_a_subject_with_its_parts(page: Path) -> None:
    for arrow in arrows(page):
        name, *parts = arrow.address.split(".")
        stage = name in ("queue", "custom")
        method = getattr(Subjects("p"), "stage" if stage else name)
        values = [part.strip("{}") for part in parts]
        assert method(*([name] if stage else []), *values) == ".".join(["p", name, *values])


class Watched(MemoryBroker):
    """Remembers the families of the subjects that were published on, in the order of their first messages."""

    def __init__(self) -> None:
        super().__init__()
        self.families: list[str] = []

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None, expect: int | None = None
    ) -> Published:
        family = subject.split(".")[1]
        if family not in self.families:
            self.families.append(family)
        return await super().publish(subject, data, message_id=message_id, headers=headers, expect=expect)
