"""The pages in a real browser: a streamed answer appears, a request's row opens, the numbers equal the metrics."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from headrace.entrypoints.dashboard.feed import MAX_FOLLOWERS
from headrace.entrypoints.dashboard.static import FILES
from tests.observability.live_service import Live, start_live

KEY = "open sesame"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    made = await start_live(step_s=0.002, options={"api_key": (KEY,)})
    made.http.headers.update(AUTH)
    yield made
    await made.end()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("this test needs chromium (Debian: apt-get install chromium)")
    async with async_playwright() as playwright:
        made = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        await made.close()


class Watched:
    """A page and everything that went wrong on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    async def open(self, url: str) -> Page:
        """Open a page and give it the key that it asks for."""
        await self.page.goto(url)
        await self.page.locator("#key").fill(KEY)
        await self.page.locator("#key").press("Enter")
        return self.page


@pytest.mark.slow
async def test_chat_and_dashboard(live: Live, browser: Browser) -> None:
    chat = Watched(await browser.new_page())
    page = await chat.open(f"{live.url}/")
    await expect(page.locator("#model")).to_have_text("tiny")
    await page.locator("#max-tokens").fill("40")
    await page.locator("#prompt").fill("Hello")
    await page.locator("#prompt").press("Enter")
    await expect(page.locator(".message.user .text")).to_have_text("Hello")
    await expect(page.locator(".message.assistant .text")).not_to_be_empty()
    await expect(page.locator("#send")).to_have_text("Send")
    await expect(page.locator(".message.assistant aside")).to_contain_text("generating")

    board = Watched(await browser.new_page(viewport={"width": 1200, "height": 900}))
    page = await board.open(f"{live.url}/dashboard")
    await expect(page.locator("#link")).to_have_text("live")
    for number in range(3):
        await live.complete(f"job-{number}", prompt="ab" * 20, max_tokens=10)
    await expect(page.locator("#requests tbody tr")).to_have_count(4)
    await expect(page.locator("#generated")).to_have_text(str(int(await metric(live, "vllm:generation_tokens_total"))))
    await expect(page.locator("#running")).to_have_text("0")
    await expect(page.locator("#preemptions")).to_have_text("0")
    hits, queries = [await metric(live, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries")]
    await expect(page.locator("#hit-rate")).to_have_text(f"{100 * hits / queries:.1f} %")

    # Keyboard only: open a row, close it, stop the picture, walk over steps.
    await page.locator("#requests tbody tr", has_text="job-1").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#explain")).to_be_visible()
    await expect(page.locator("#explain-body")).to_contain_text("finished (length)")
    await expect(page.locator("#explain-body")).to_contain_text("of 40 prompt tokens came from the prefix cache")
    await page.keyboard.press("Escape")
    await expect(page.locator("#explain")).to_be_hidden()
    await page.keyboard.press("p")
    await expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    await expect(page.locator("#rewind")).to_be_enabled()
    await page.locator("#steps").focus()
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#step-detail")).to_contain_text(
        re.compile(r"Step \d+: 1 tokens in .*cmpl-job-2 1.*forward")
    )
    assert chat.errors == board.errors == []


@pytest.mark.slow
async def test_pause_stops_the_picture_and_rewind_takes_it_back(live: Live, browser: Browser) -> None:
    board = Watched(await browser.new_page(viewport={"width": 1200, "height": 900}))
    page = await board.open(f"{live.url}/dashboard")
    await expect(page.locator("#generated")).to_have_text("0")
    await live.complete("one", max_tokens=7)
    await expect(page.locator("#generated")).to_have_text("7")
    await page.locator("#pause").click()
    await live.complete("two", max_tokens=9)
    async with page.expect_response("**/explain"):
        await page.locator("#requests tbody tr", has_text="one").click()
    await page.keyboard.press("Escape")
    # A tick and more went by; the picture stands still, and can be taken back to before the first request.
    await page.wait_for_timeout(1500)
    await expect(page.locator("#generated")).to_have_text("7")
    await page.locator("#rewind").fill("0")
    await expect(page.locator("#generated")).to_have_text("0")
    await expect(page.locator("#when")).to_contain_text("back")
    await page.locator("#pause").click()
    await expect(page.locator("#generated")).to_have_text("16")
    await expect(page.locator("#when")).to_have_text("now")
    assert board.errors == []


PIXEL = """([id, x, y]) => {
  const canvas = document.getElementById(id), scale = devicePixelRatio;
  return Array.from(canvas.getContext("2d").getImageData(x * scale, y * scale, 1, 1).data).slice(0, 3);
}"""
COLOUR = """(name) => {
  const probe = document.createElement("i");
  probe.style.background = `var(--${name})`;
  document.body.append(probe);
  return getComputedStyle(probe).backgroundColor.match(/\\d+/g).map(Number);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1360])
async def test_every_scheme_and_width(live: Live, browser: Browser, scheme: Any, width: int) -> None:
    context = await browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    board = Watched(await context.new_page())
    # Three blocks of 4 tokens stay findable, the fourth is not full.
    await live.complete("a", prompt="ab" * 6, max_tokens=2)
    page = await board.open(f"{live.url}/dashboard")
    await expect(page.locator("#block-legend")).to_contain_text("cached, free to take 3")
    await expect(page.locator("#block-legend")).to_contain_text("free 253")
    assert await page.evaluate(PIXEL, ["blocks", 3, 3]) == await page.evaluate(COLOUR, "cached")
    height = await page.evaluate("document.getElementById('blocks').clientHeight")
    assert await page.evaluate(PIXEL, ["blocks", 3, height - 5]) == await page.evaluate(COLOUR, "free")
    assert await page.evaluate("document.documentElement.scrollWidth") == width, "nothing may stick out at the side"
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(background) < 128 * 3) == (scheme == "dark")
    chat = Watched(await context.new_page())
    page = await chat.open(f"{live.url}/")
    assert await page.evaluate("document.documentElement.scrollWidth") == width
    assert board.errors == chat.errors == []
    await context.close()


@pytest.mark.slow
async def test_the_key_goes_with_the_stream_and_a_wrong_one_is_asked_for_again(live: Live, browser: Browser) -> None:
    page = await browser.new_page()
    sent: list[dict[str, str]] = []
    page.on("request", lambda request: sent.append({"url": request.url, **request.headers}))
    await page.goto(f"{live.url}/dashboard")
    await page.locator("#key").fill("wrong")
    await page.locator("#key").press("Enter")
    await expect(page.locator("#link")).to_contain_text("valid API key")
    await expect(page.locator("#key")).to_be_focused()
    await page.locator("#key").fill(KEY)
    await page.locator("#key").press("Enter")
    await expect(page.locator("#link")).to_have_text("live")
    feeds = [one for one in sent if one["url"].endswith("/v1/dashboard/feed")]
    assert feeds and feeds[-1]["authorization"] == f"Bearer {KEY}"
    assert not [one for one in sent if KEY.replace(" ", "%20") in one["url"]], "the key stands in no address"
    assert all(one["url"].startswith(live.url) for one in sent), "nothing is loaded from elsewhere"


async def metric(live: Live, name: str) -> float:
    lines = (await live.http.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).rsplit(" ", 1)[1])


async def test_files_are_open_and_data_is_not(live: Live) -> None:
    async with httpx.AsyncClient(base_url=live.url, trust_env=False) as anybody:
        for path in FILES:
            reply = await anybody.get(path)
            assert reply.status_code == 200, path
            assert "default-src 'self'" in reply.headers["content-security-policy"]
            assert "https://" not in reply.text, f"{path} must load nothing from elsewhere"
        for path in ("/v1/dashboard/feed", "/v1/dashboard/setup"):
            assert (await anybody.get(path)).status_code == 401


async def test_pages_lie_behind_a_proxy_too() -> None:
    made = await start_live(options={"root_path": "/models/tiny"})
    try:
        for path in ("/", "/dashboard", "/assets/api.js", "/v1/models"):
            assert (await made.http.get(path)).status_code == 200, path
        page = (await made.http.get("/dashboard")).text
        assert not re.search(r'(src|href)="/', page), "links must be relative"
    finally:
        await made.end()


async def test_the_setup_shows_choices_with_reasons(live: Live) -> None:
    setup = (await live.http.get("/v1/dashboard/setup")).json()
    rows = {row["name"]: row for row in setup["config"]}
    assert rows["scheduler.pipeline_depth"] == {
        "name": "scheduler.pipeline_depth",
        "value": 2,
        "reason": "set by the user",
    }
    assert KEY not in str(setup)
    assert set(setup["attention"]) == {"chosen", "refused"}
    assert setup["graphs"] == {"mode": "EAGER", "reason": "there is no model"}


async def test_the_feed_is_bounded_and_ends_with_the_server(live: Live) -> None:
    await live.complete("a", max_tokens=200)
    streams: list[Any] = []
    for _ in range(MAX_FOLLOWERS):
        context = live.http.stream("GET", "/v1/dashboard/feed")
        reply = await context.__aenter__()
        lines = reply.aiter_lines()
        first = await anext(lines)
        assert len(first) < 200_000
        streams.append((context, lines))
    refused = await live.http.get("/v1/dashboard/feed")
    assert refused.status_code == 429
    assert (await live.http.get("/load")).json() == {"server_load": 0}
    live.context.draining = True
    for context, lines in streams:
        async with asyncio.timeout(5):
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        await context.__aexit__(None, None, None)
