"""A model of the catalogue that is declared, too: its requests wait even while no agent lives to announce it."""

from __future__ import annotations

from in_process import MODEL, TOKENS, Hosting

from penstock.streams.stores.declared import declare
from penstock.streams.topology import MODELS


async def test_what_waits_while_no_agent_lives_is_for_the_revision_that_was_served_last() -> None:
    hosting = await Hosting.start()
    pipe = hosting.pipeline.pipe
    registry = pipe.registry
    await declare(pipe.broker, pipe.settings, [registry.models[MODEL]])
    await hosting.until(lambda: MODEL in registry.declared)
    await hosting.swap("b")
    await hosting.settled()
    await hosting.until(lambda: registry.declared[MODEL].revision == 2)
    await hosting.stop_agent()

    announced = await pipe.broker.bucket(MODELS)  # it forgets them after ten minutes
    for entry in await announced.entries():
        await announced.delete(entry.key)
    await hosting.until(lambda: not registry.agents and not hosting.workers)
    assert hosting.revision == 2
    asked = await hosting.ask()
    hosting.start_agent()
    assert await asked.answer() == "b" * TOKENS

    await hosting.change(lambda catalogue: catalogue.remove(MODEL))
    await hosting.until(lambda: MODEL not in registry.declared and MODEL not in registry.models)
    await hosting.stop()
