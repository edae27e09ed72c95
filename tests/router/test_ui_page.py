"""The page at /ui in headless Chromium, over a real router with workers of the fake model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.browser import Seen, needs_chromium, visiting
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import router_server, serving
from tests.router.test_api_keys import key_file
from tests.router.test_ui import busy_traces, many_workers
from tests.router.whole import GOOD, Whole, whole_router

pytestmark = needs_chromium

EVIL = "<img/src=x/onerror=document.title=1>"


async def ask(whole: Whole, request_id: str, **more: Any) -> None:
    async with whole.client() as client:
        response = await client.post("/v1/completions", json=GOOD | more, headers={"x-request-id": request_id})
        assert response.status_code == 200


async def texts(seen: Seen, selector: str) -> list[str]:
    found: list[str] = await seen.page.locator(selector).all_inner_texts()
    return found


def test_it_shows_the_workers_and_the_requests_with_their_phases():
    async def main() -> None:
        async with whole_router() as whole, visiting(whole.http_port) as seen:
            await asyncio.gather(*(ask(whole, f"r{at}", max_tokens=40) for at in range(3)), ask(whole, EVIL))
            page = seen.page
            await page.wait_for_selector(".request >> nth=3")
            assert await texts(seen, ".worker h3") == ["prefill", "decode"]
            assert await texts(seen, ".worker .state") == ["● ready", "● ready"]
            assert {"prefill", "decode"} <= set((await texts(seen, ".latest td[data-column=workers]"))[0].split(" → "))
            for phase in ("prefill", "transfer", "decode"):
                assert await page.locator(f".request rect.{phase}").count() >= 4
            # What a client calls its request is text, wherever it is shown.
            await page.locator(".latest button", has_text="onerror").click()
            assert await page.locator("#request h3").inner_text() == EVIL
            assert await page.locator("#request code").inner_text() == f"kvferry trace '{EVIL}'"
            assert await page.locator("main img").count() == 0
            assert await page.title() == "test · kvferry"
            assert await seen.overflow() == 0

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390, 320])
@pytest.mark.parametrize("count", [2, 200])
def test_nothing_is_wider_than_the_window(width, count):
    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        busy_traces(router, 50)
        async with serving(router) as server:
            server._pool.workers = many_workers(count)  # type: ignore[attr-defined]
            async with visiting(server.http_port, width) as seen:
                await seen.page.wait_for_selector(".worker" if count == 2 else ".cell")
                assert await seen.page.locator(".cell").count() == (0 if count == 2 else 200)
                assert await seen.overflow() == 0

    asyncio.run(main())


@pytest.mark.slow
def test_200_workers_are_cells_that_tell_more_by_pointer_and_by_keyboard():
    async def main() -> None:
        async with serving(ScriptedRouter(words(" a"))) as server:
            server._pool.workers = many_workers(200)  # type: ignore[attr-defined]
            async with visiting(server.http_port) as seen:
                page, details = seen.page, "[data-role=prefill] .picked h3"
                await page.locator("[data-role=prefill] .cell >> nth=5").hover()
                assert await texts(seen, details) == ["prefill-10"]
                await page.locator("[data-role=prefill] .cell >> nth=0").focus()
                await page.keyboard.press("ArrowRight")
                assert await texts(seen, details) == ["prefill-2"]
                await page.keyboard.press("End")
                assert await texts(seen, details) == ["prefill-198"]

    asyncio.run(main())


@pytest.mark.slow
def test_it_says_when_the_router_is_gone_and_goes_on_when_it_is_back():
    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        server = router_server(router)
        await server.start()
        port = server.http_port
        async with visiting(port) as seen:
            page = seen.page
            await page.wait_for_selector("#ready[data-state=ready]")
            assert await page.locator("#notice").is_hidden()
            await server.stop()
            await page.wait_for_selector("#notice:visible")
            assert "does not answer" in await page.locator("#notice").inner_text()
            await page.wait_for_function("/Last heard [1-9]+ s ago/.test(document.getElementById('notice').innerText)")
            server = router_server(router, http_port=port)
            await server.start()
            await page.wait_for_selector("#notice", state="hidden")
        await server.stop()

    asyncio.run(main())


@pytest.mark.slow
def test_a_hidden_page_asks_nothing():
    async def main() -> None:
        async with serving(ScriptedRouter(words(" a"))) as server, visiting(server.http_port) as seen:
            asked: list[str] = []
            seen.page.on("request", lambda request: asked.append(request.url))
            await seen.page.wait_for_timeout(2500)
            assert 2 <= len(asked) <= 4
            await seen.page.evaluate(
                "Object.defineProperty(document, 'hidden', {configurable: true, get: () => window.away ?? true});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            await seen.page.wait_for_timeout(300)
            asked.clear()
            await seen.page.wait_for_timeout(2500)
            assert asked == []
            await seen.page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
            await seen.page.wait_for_timeout(300)
            assert len(asked) == 1

    asyncio.run(main())


@pytest.mark.slow
def test_with_keys_a_browser_shows_a_tenants_requests_for_its_key(tmp_path):
    path, keys = key_file(tmp_path, acme={}, other={})

    async def main() -> None:
        async with whole_router(api_keys=str(path)) as whole:
            for tenant, key in keys.items():
                async with whole.client(headers={"authorization": f"Bearer {key}"}) as client:
                    await client.post("/v1/completions", json=GOOD, headers={"x-request-id": f"of-{tenant}"})
            credentials = {"username": "me", "password": keys["acme"]}
            async with visiting(whole.http_port, http_credentials=credentials) as seen:
                await seen.page.wait_for_selector(".latest button")
                assert await texts(seen, ".latest button") == ["of-acme"]

    asyncio.run(main())
