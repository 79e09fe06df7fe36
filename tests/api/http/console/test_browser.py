"""The page in a real browser, at a real server under load: every panel, every action, and what is killed meanwhile."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import Any

import pytest
import requests
from console import ADMIN, KEYS, USER, WIDE, Load, browsing, bury, catalogue, child, page_of, serious_faults
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect
from serving import Served, serving

PANELS = ("", "requests", "queue", "models", "workers", "letters", "chat")
SMALL = ViewportSize(width=400, height=800)
some = re.compile(r"[1-9]")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("console")
    arguments = "--models", str(catalogue(root)), "--echo-rate", "30", "--max-batch-size", "2", "--api-keys", KEYS
    with serving(root / "state", *arguments, "--heartbeat-interval", "0.5") as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with page_of(browser, served) as page:
        yield page


def show(page: Page, panel: str) -> None:
    page.evaluate("path => { location.hash = path }", f"#/{panel}")
    expect(page.locator(f"main.{panel.partition('/')[0] or 'overview'}")).to_be_visible()


def test_every_panel_has_live_data_under_load(served: Served, page: Page) -> None:
    with Load(served, "main", 14):
        stages = page.locator(".stage")
        expect(stages.locator("h3")).to_have_text(["validate", "queue", "batch", "infer", "stream"])
        for stage in ("batch", "infer", "stream"):
            card = stages.filter(has=page.get_by_role("heading", name=stage))
            expect(card.locator(".main-number b")).to_have_text(some)
        for title in ("Tokens a second", "Requests", "Time to the first token"):
            plot = page.locator(".plot", has=page.get_by_role("heading", name=title, exact=True))
            expect(plot.locator("path.line").first).to_be_visible()
            expect(plot.locator(".legend b").first).to_have_text(some)
        assert serious_faults(page) == []

        show(page, "requests")
        running = page.locator("tbody tr", has=page.locator(".badge.run"))
        expect(running.first.locator("td").nth(2)).to_have_text("acme")
        expect(running.first.locator("td.number").first).to_have_text(some)
        page.get_by_role("button", name="Ended").click()
        expect(page.locator("tbody .badge.good").first).to_be_visible()
        page.get_by_label("Filter the requests").fill("no such word")
        expect(page.get_by_text("No requests here")).to_be_visible()
        page.get_by_label("Filter the requests").fill("")
        page.get_by_role("button", name="All").click()
        assert serious_faults(page) == []

        show(page, "queue")
        expect(page.locator("td.position").first).to_have_text("1")
        assert serious_faults(page) == []

        show(page, "workers")
        expect(page.locator(".card h2")).to_have_count(2)
        for each in page.locator(".card").all():
            expect(each.locator(".gauge b").first).to_have_text(re.compile("[1-9] of 2"))
        assert serious_faults(page) == []


def test_a_link_shows_the_same_list_and_a_paused_page_stands_still(served: Served, page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    with Load(served, "main", 3):
        show(page, "requests")
        page.get_by_role("button", name="Ended").click()
        page.get_by_label("Filter the requests").fill("acme")
        page.reload()
        expect(page.get_by_role("button", name="Ended")).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_label("Filter the requests")).to_have_value("acme")
        row = page.locator("tbody a.id").first
        expect(row).to_be_visible()
        page.locator("body").press("p")
        expect(page.locator(".status")).to_have_text("Paused")
        name = str(row.get_attribute("title"))
        row.click()
        page.get_by_role("button", name="Copy the id").click()
        expect(page.locator(".toast")).to_have_text("The id is copied.")
        assert page.evaluate("navigator.clipboard.readText()") == name
        expect(row).to_have_attribute("title", name)  # though others have ended meanwhile
        page.locator("body").press("p")
        expect(page.locator(".status")).to_have_text("Live")
        expect(row).not_to_have_attribute("title", name)


def test_a_waiting_request_is_cancelled(served: Served, page: Page) -> None:
    with Load(served, "main", 14, max_tokens=200):
        show(page, "queue")
        last = page.locator("tbody tr").last
        expect(last.locator("td.position")).to_have_text(some)
        link = last.locator("a.id")
        name = str(link.get_attribute("title"))
        page.get_by_title(f"Cancel {name}").press("Enter")
        expect(page.locator(".toast")).to_contain_text("is cancelled")
        expect(page.locator(f"a.id[title='{name}']")).to_have_count(0)
        expect(page.locator("tbody a.id:focus")).to_be_visible()  # of another request
        show(page, f"requests/acme/{name}")
        expect(page.locator(".detail .badge").first).to_have_text("cancelled")


def test_a_takeover_is_seen_in_the_life_of_a_request(served: Served, page: Page) -> None:
    body: dict[str, Any] = {"model": "main", "prompt": "x", "max_tokens": 600, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {USER}"}
    with requests.post(f"{served.url}/v1/completions", json=body, headers=headers, stream=True, timeout=60) as response:
        name = response.headers["x-request-id"]
        show(page, f"requests/acme/{name}")
        infer = page.locator(".span", has_text=re.compile("^infer"))
        expect(infer).to_have_count(1)
        worker = str(page.locator("tr.current td").nth(3).text_content())
        child(served, worker).kill()
        expect(page.locator(".told")).to_contain_text(worker)
        expect(infer.first.locator(".bar.bad")).to_be_visible()
        expect(infer.nth(1)).to_contain_text("from token")
        expect(page.locator("tr.current .tag")).to_have_text("taken over")
        assert serious_faults(page) == []
        page.locator(".detail").get_by_title(f"Cancel {name}").click()
        expect(page.locator(".detail .badge").first).to_have_text("cancelled")
    show(page, "workers")
    expect(page.locator(".card .badge.good")).to_have_count(2)


def test_models_are_loaded_swapped_and_unloaded(served: Served, page: Page) -> None:
    show(page, "models")
    spare = page.get_by_role("article", name="Model spare")
    spare.get_by_title("Load spare").click()
    expect(spare.locator(".badge").first).to_have_text("ready")
    spare.get_by_label("Swap spare to").fill("no-files-3")
    spare.get_by_role("button", name="Swap").click()
    expect(spare.locator(".fact", has_text="Revision").locator("dd")).to_have_text("2")
    assert serious_faults(page) == []
    spare.get_by_title("Unload spare").click()
    expect(spare.locator(".badge").first).to_have_text("unloaded")


def test_dead_letters_are_shown_retried_and_dropped(served: Served, page: Page) -> None:
    bury(served, "lost-1", "main")
    bury(served, "lost-2", "main")
    show(page, "letters")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("the disk was full")
    page.get_by_title("Show dead letter 1").click()
    expect(page.locator("tr.whole")).to_contain_text("penstock.jobs.high.acme")
    expect(page.locator("tr.whole")).to_contain_text("Hidden, as it holds what clients wrote")
    assert "a secret" not in page.content()
    assert serious_faults(page) == []
    page.get_by_title("Retry dead letter 1").click()
    expect(page.locator(".toast", has_text="Sent again as lost-1-r1.")).to_be_visible()
    page.get_by_title("Drop dead letter 2").click()
    page.get_by_role("dialog").get_by_role("button", name="Drop").click()
    expect(page.get_by_text("No dead letters")).to_be_visible()
    bury(served, "lost-3", "main")
    bury(served, "lost-4", "main")
    page.get_by_role("button", name="Retry all").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry all").click()
    expect(page.locator(".toast", has_text="Sent 2 dead letters on their way again.")).to_be_visible()
    expect(page.locator(".toast", has_text="Sent again as lost-3")).to_have_count(0)
    show(page, "requests/acme/lost-1-r1")
    expect(page.locator(".detail .badge").first).to_have_text("completed")


def test_a_chat_goes_on_when_the_bridge_is_killed(served: Served, page: Page) -> None:
    words = " ".join(f"word{number}" for number in range(40))
    show(page, "chat")
    page.get_by_label("Model").select_option("main")
    page.get_by_label("Your message").fill(words)
    page.get_by_label("Your message").press("Enter")
    answer = page.locator(".turn.assistant .text").last
    expect(answer).to_contain_text("word2")
    page.route("**/v1/chat/completions", lambda route: route.abort(), times=2)  # attempts that fail do not count
    child(served, "front").kill()
    expect(page.locator(".turn.assistant .badge", has_text="resumed once, nothing lost")).to_be_visible()
    body: dict[str, Any] = {"model": "main", "messages": [{"role": "user", "content": words}]}
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with ThreadPoolExecutor(1) as pool:  # beside the other, as each takes seconds
        asked = pool.submit(requests.post, f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        undisturbed = asked.result().json()
    expect(answer).to_have_text(undisturbed["choices"][0]["message"]["content"])
    expect(page.locator(".status")).to_have_text("Live")
    assert serious_faults(page) == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_usable_on_a_small_screen_and_by_keyboard(browser: Browser, served: Served, dark: bool) -> None:
    bury(served, f"small-{dark}", "main")
    with Load(served, "main", 10), page_of(browser, served, SMALL, dark=dark) as page:
        for number, panel in enumerate(PANELS, 1):
            page.locator("body").press(str(number))
            expect(page.locator("nav a[aria-current]")).to_have_attribute("href", f"#/{panel}")
            assert page.evaluate("document.documentElement.scrollWidth") <= SMALL["width"], panel
            assert serious_faults(page) == []
        for shape in ({"key": "з", "code": "KeyP"}, {"key": "é", "code": "Digit2"}):  # Russian, and French
            page.locator("body").dispatch_event("keydown", {**shape, "bubbles": True})
        expect(page.locator(".status")).to_have_text("Paused")
        page.locator("body").press("p")
        page.locator("body").press("/")
        expect(page.get_by_label("Filter the requests")).to_be_focused()
        page.locator("tbody a.id").first.focus()
        page.locator("tbody a.id").first.press("Enter")
        expect(page.locator(".detail")).to_be_visible()
        page.locator(".detail h2").press("Escape")
        expect(page.locator(".detail")).to_have_count(0)


def test_what_has_the_focus_keeps_it_while_the_list_changes(served: Served, page: Page) -> None:
    headers = {"Authorization": f"Bearer {USER}"}

    def ask(max_tokens: int) -> requests.Response:
        body: dict[str, Any] = {"model": "main", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
        body["stream"] = max_tokens > 1
        return requests.post(f"{served.url}/v1/completions", json=body, headers=headers, stream=True, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        for response in pool.map(ask, [1] * 61):
            assert response.json()["usage"]["completion_tokens"] == 1
    show(page, "requests")
    note = page.get_by_label("Requests", exact=True).locator(".note")
    expect(note).to_contain_text("the newest 60 of")
    search = page.get_by_label("Filter the requests")
    search.focus()
    page.keyboard.type("no such")
    expect(search).to_have_value("no such")
    expect(note).to_have_count(0)  # it stood before the search
    expect(search).to_be_focused()
    search.fill("")
    expect(note).to_have_count(1)
    keyboard = page.context.new_cdp_session(page)
    for text in ("に", "にほ"):  # a word that is composed of several keys
        keyboard.send("Input.imeSetComposition", {"text": text, "selectionStart": len(text), "selectionEnd": len(text)})
        expect(note).to_have_count(0)
    expect(search).to_have_value("にほ")
    search.fill("")

    with ask(600) as older, ask(30) as newer:
        link = page.locator(f"a.id[title='{older.headers['x-request-id']}']")
        link.focus()
        assert newer.content.endswith(b"data: [DONE]\n\n")
        done = page.locator("tr", has=page.locator(f"a.id[title='{newer.headers['x-request-id']}']"))
        expect(done.locator(".badge.good")).to_be_visible()  # and its row lies below the other now
        expect(link).to_be_focused()
        name = older.headers["x-request-id"]
        assert requests.delete(f"{served.url}/v1/streams/{name}", headers=headers, timeout=60).ok


def test_a_broken_address_an_early_pause_and_the_skip_link_do_no_harm(page: Page) -> None:
    held: list[Route] = []
    page.route("**/server/events", lambda route: held.append(route))
    show(page, "requests/acme/100%")
    page.reload()
    expect(page.get_by_text("One moment")).to_be_visible()
    page.locator("body").press("p")  # there is nothing yet to stand still
    held.pop().fulfill(status=502)
    expect(page.get_by_text("The server answered with status 502.")).to_be_visible()
    page.unroute("**/server/events")
    for route in held:
        route.continue_()
    expect(page.locator(".detail h2")).to_have_text("100%")
    page.get_by_role("link", name="Skip to the content").press("Enter")
    expect(page.locator("main.requests")).to_be_focused()


def test_names_of_any_length_and_content_keep_every_panel_usable(browser: Browser, served: Served) -> None:
    evil, long = "<img src=x onerror='window.harmed = 1'>%/#?", "x" * 250
    now = time.time()
    one = {"tenant": "acme", "created": now, "model": long, "worker": long, "tokens": 1, "takeovers": 0}
    worker = {"host": long, "pid": 1, "capacity": 2, "active": 1, "revision": 1}
    letter = {"stage": "validate", "reason": evil + long * 9, "requests": [evil] * 40, "deliveries": 5}
    state: dict[str, Any] = {
        "server": {"now": now, "loads_models": True},
        "pipeline": {long: {"index": 0, "copies": 0, "rate": 1, "waiting": 1}},
        "requests": {
            f"acme/{state}": one | {"id": state, "state": state, "reason": evil}
            for state in ("waiting", "running", "failed")
        },
        "counts": {"waiting": 12345},
        "models": {
            name: {"id": name, "state": "failed", "last_error": long * 9, "swap": {"state": "failed", "source": long}}
            for name in (evil, long)
        },
        "workers": {evil: worker | {"state": "dead", "model": evil}, long: worker | {"state": "live", "model": long}},
        "letters": {str(number): letter | {"number": number} for number in (1, 2)},
        "figures": {},
    }
    versions = chain("1", repeat("2"))

    def tell(route: Route) -> None:
        state["server"]["version"] = next(versions)
        route.fulfill(content_type="text/event-stream", body=f"event: snapshot\ndata: {json.dumps(state)}\n\n")

    context = browser.new_context(viewport=ViewportSize(width=320, height=640), forced_colors="active")
    page = context.new_page()
    page.route("**/server/events", tell)
    page.goto(served.url)
    for panel in PANELS:
        show(page, panel)
        expect(page.locator("main section, main article").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, panel
        assert serious_faults(page) == []
    show(page, "workers")
    full = "getComputedStyle(document.querySelector('.meter span')).backgroundColor"
    assert page.evaluate(full) != page.evaluate("getComputedStyle(document.querySelector('.meter')).backgroundColor")
    page.emulate_media(forced_colors="none")
    assert serious_faults(page) == []
    assert page.evaluate("window.harmed") is None
    page.set_viewport_size(WIDE)
    page.get_by_role("link", name="Version 2 runs").click()
    expect(page.locator(".version")).to_have_text("Version 2")
    context.close()


def test_what_fails_for_a_moment_is_asked_for_again(served: Served, page: Page) -> None:
    headers = {"Authorization": f"Bearer {USER}"}
    body: dict[str, Any] = {"model": "main", "prompt": "x", "max_tokens": 1}
    name = requests.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60).headers["x-request-id"]
    away = {"error": {"message": "The broker is away."}}
    page.route("**/trace?*", lambda route: route.fulfill(status=503, json=away), times=1)
    page.clock.install()
    show(page, f"requests/acme/{name}")
    expect(page.locator(".detail .fault")).to_have_text("The broker is away.")
    expect(page.locator(".detail .badge").first).to_have_text("completed")
    expect(page.locator(".detail .fault")).to_have_count(0)

    front = child(served, "front")
    front.suspend()  # its connections stay, and are silent
    try:
        page.clock.fast_forward(20_000)
        expect(page.locator(".status")).to_have_text("Reconnecting…")
    finally:
        front.resume()
    expect(page.locator(".status")).to_have_text("Live")


def test_a_chat_keeps_its_model_and_what_is_typed_and_stops_while_it_waits(served: Served, page: Page) -> None:
    page.add_init_script("delete Crypto.prototype.randomUUID")  # as on a page that another machine sends without TLS
    page.reload()
    show(page, "chat")
    message = page.get_by_label("Your message")
    page.get_by_label("Model").select_option("spare")
    message.fill("hello")
    message.dispatch_event("keydown", {"key": "Enter", "keyCode": 229})  # it ends the composition of a word
    show(page, "models")
    show(page, "chat")
    expect(page.get_by_label("Model")).to_have_value("spare")
    expect(message).to_have_value("hello")
    page.get_by_label("Model").select_option("main")
    with Load(served, "main", 14, max_tokens=2000):
        show(page, "workers")
        for each in page.locator(".card", has_text="main").all():
            expect(each.locator(".gauge b").first).to_have_text("2 of 2")
        show(page, "chat")
        message.press("Enter")
        expect(page.locator(".turn.assistant .badge")).to_have_text(re.compile("waiting"))
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".turn.assistant .badge")).to_have_text("stopped")
        show(page, "requests")
        page.get_by_label("Filter the requests").fill("op main")
        expect(page.locator("tbody .badge").first).to_have_text("cancelled")
        show(page, "chat")
    message.fill("once more")
    with page.expect_request("**/v1/chat/completions") as asked:
        message.press("Enter")
    body = asked.value.post_data_json
    assert body and body["messages"] == [{"role": "user", "content": "once more"}]
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    message.fill("a long one " * 90)
    message.press("Enter")
    expect(page.locator(".turn.assistant .text").last).to_contain_text("a long")
    page.reload()
    show(page, "requests")
    page.get_by_label("Filter the requests").fill("op main")
    expect(page.locator("tbody .badge").first).to_have_text("cancelled")


@pytest.mark.parametrize("forbidden", [False, True])
def test_it_asks_for_a_key_and_takes_no_other(browser: Browser, served: Served, forbidden: bool) -> None:
    context = browser.new_context(viewport=WIDE)
    if forbidden:  # as a browser does it that lets pages keep nothing
        for storage in ("localStorage", "sessionStorage"):
            context.add_init_script(f"Object.defineProperty(window, '{storage}', {{ get() {{ throw new Error() }} }})")
    page = context.new_page()
    page.goto(served.url)
    expect(page.get_by_text("This server wants an API key")).to_be_visible()
    for key, status in (("sk-user-of-acme", "Key needed"), ("ключ", "Key needed"), (ADMIN, "Live")):
        page.get_by_role("button", name="Enter a key").click()
        page.get_by_role("dialog").get_by_label("Key").fill(key)
        page.get_by_role("dialog").get_by_role("button", name="Save").click()
        expect(page.locator(".status")).to_have_text(status)
    button = page.get_by_role("button", name="API key")
    button.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(button).to_be_focused()
    context.close()


def test_it_works_below_another_path(browser: Browser, served: Served) -> None:
    """As behind a proxy that passes on what comes for /llm/, without /llm."""
    context = browser.new_context(viewport=WIDE)
    context.route(
        lambda url: url.startswith(served.url),
        lambda route: (
            route.continue_(url=route.request.url.replace("/llm/", "/"))
            if "/llm/" in route.request.url
            else route.abort()
        ),
    )
    page = context.new_page()
    page.goto(f"{served.url}/llm/")
    page.get_by_role("button", name="Enter a key").click()
    page.get_by_role("dialog").get_by_label("Key").fill(ADMIN)
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.locator(".status")).to_have_text("Live")
    page.locator(".brand img").evaluate("image => image.decode()")  # which fails unless it was found
    context.close()
