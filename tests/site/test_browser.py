"""The built site in a real browser: `make docs-test`.

Skips where the site, playwright or Chromium is missing. `CHROMIUM` names a Chromium that is not on
the path.
"""

import functools
import http.server
import os
import re
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import scaledtensor as sct

pytestmark = pytest.mark.site

SITE = Path(__file__).parents[2] / "site"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if not PAGES:
        pytest.skip("the site is not built: make docs")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make docs-test")
    if CHROMIUM is None:
        pytest.skip("no Chromium: install it (Debian: apt-get install chromium), or set CHROMIUM")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


class _Marks(HTMLParser):
    """The ids of a page, the targets of its links, and the files that it loads by itself."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed((SITE / page).read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name == "href" and value and tag == "a":
                self.links.append(value)
            elif name in ("src", "srcset", "href", "data", "poster") and value:
                self.loads.append(value)


@functools.cache
def marks(page: str) -> _Marks:
    return _Marks(page)


def test__no_page_loads_a_file_of_another_host() -> None:
    loads = {
        f"{page}: {url}" for page in PAGES for url in marks(page).loads if urlsplit(url).netloc
    }
    styles = {
        f"{p.name}: {url}"
        for p in SITE.rglob("*.css")
        for url in re.findall(r"url\(['\"]?([^'\")]+)|@import ['\"]([^'\"]+)", p.read_text())
        if any(urlsplit(part).netloc for part in url)
    }
    assert not loads | styles


def test__no_page_shows_an_address_in_memory_or_a_folder_of_this_machine() -> None:
    root = str(SITE.parent)
    for page in PAGES:
        text = re.sub(r"<[^>]+>", "", (SITE / page).read_text())
        assert not re.search(r" at 0x[0-9a-f]{8}|_MISSING_TYPE", text), page
        assert root not in text, page


def test__every_link_inside_the_site__leads_to_a_page_and_a_place_on_it() -> None:
    broken = []
    for page in PAGES:
        for link in marks(page).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (SITE / page).parent / unquote(parts.path) if parts.path else SITE / page
            target = target.resolve()
            anchor = unquote(parts.fragment)
            there = target.is_file() and target.is_relative_to(SITE.resolve())
            if there and anchor and target.suffix == ".html":
                there = anchor in marks(target.relative_to(SITE.resolve()).as_posix()).ids
            if not there:
                broken.append(f"{page}: {link}")
    assert not broken


def test__the_index_of_the_reference__links_every_name() -> None:
    linked = {urlsplit(link).fragment for link in marks("reference/index.html").links}
    for name in ("scaledtensor", "formats", "functional", "nn", "compat.unit_scaling"):
        path = name if name == "scaledtensor" else f"scaledtensor.{name}"
        named = {f"{path}.{n}" for n in import_module(path).__all__}
        assert not {n for n in named - linked if f"module-{n}" not in linked}


def test__every_public_name__has_an_entry_in_the_reference(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/reference/scaledtensor.html")
    there = set(page.eval_on_selector_all("[id]", "found => found.map(x => x.id)"))
    modules = {n for n in sct.__all__ if f"reference/{n}.html" in PAGES}
    assert {f"scaledtensor.{n}" for n in sct.__all__ if n not in modules} <= there
    for name in sorted(modules):
        page.goto(f"{address}/reference/{name}.html")
        there = set(page.eval_on_selector_all("[id]", "found => found.map(x => x.id)"))
        module = import_module(f"scaledtensor.{name}")
        public = getattr(module, "__all__", ["ScaledTensorError", "SaturationWarning"])
        lacking = {f"scaledtensor.{name}.{n}" for n in public} - there
        assert f"module-scaledtensor.{name}" in there
        assert not {n for n in lacking if f"module-{n}" not in there}
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test__no_page_has_an_error_or_a_failed_request(browser: Any, address: str, scheme: str) -> None:
    context = browser.new_context(viewport=DESK, color_scheme=scheme)
    page, wrong = context.new_page(), []
    page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # The next page cancels open requests of this one; a file that is absent has a status.
    page.on(
        "requestfailed",
        lambda r: r.failure != "net::ERR_ABORTED" and wrong.append(f"failed: {r.url}"),
    )
    page.on("response", lambda r: r.status >= 400 and wrong.append(f"{r.status}: {r.url}"))
    page.on("request", lambda r: r.url.startswith(address) or wrong.append(f"asked: {r.url}"))
    for name in PAGES:
        page.goto(f"{address}/{name}", wait_until="load")
        broken = page.eval_on_selector_all(
            "img", "all => all.filter(x => !x.naturalWidth && x.loading != 'lazy').map(x => x.src)"
        )
        wrong += [f"no picture: {source}" for source in broken]
        assert not wrong, name
    page.evaluate("fetch('/absent.js').then(() => console.error('said'))")
    page.wait_for_timeout(300)
    assert f"404: {address}/absent.js" in wrong, "an error is seen"
    assert "said" in wrong
    context.close()


def test__on_a_phone__no_page_scrolls_sideways(browser: Any, address: str) -> None:
    context = browser.new_context(viewport=PHONE, device_scale_factor=2, is_mobile=True)
    page, wide = context.new_page(), {}
    for name in PAGES:
        page.goto(f"{address}/{name}", wait_until="load")
        across = page.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
        )
        if across > PHONE["width"]:
            wide[name] = across
    assert not wide
    context.close()


def test__on_a_phone__the_menu_opens_and_leads_on(browser: Any, address: str) -> None:
    context = browser.new_context(viewport=PHONE, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(f"{address}/index.html")
    page.locator(".mobile-header label[for=__navigation]").tap()
    page.locator(".sidebar-drawer a", has_text="Concepts").first.tap()
    page.wait_for_url("**/concepts.html")
    assert page.locator(".drawn svg").count() == 3
    size = page.evaluate("getComputedStyle(document.querySelector('article p')).fontSize")
    assert float(size.removesuffix("px")) >= 15
    context.close()


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("rebalance", "reference/scaledtensor.html#scaledtensor.rebalance"),
        ("quantize_blocks", "reference/formats.html#scaledtensor.formats.quantize_blocks"),
        ("LoRA", "how_to/lora.html"),
    ],
)
def test__the_search__finds(browser: Any, address: str, words: str, place: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    page.get_by_role("textbox", name="Search").first.fill(words)
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function(
        "place => [...document.querySelectorAll('#search-results li a')]"
        ".some(x => x.href.includes(place))",
        arg=place,
        timeout=10_000,
    )
    page.close()


def test__drawings_follow_the_choice_of_light_or_dark(browser: Any, address: str) -> None:
    context = browser.new_context(viewport=DESK, color_scheme="light")
    page = context.new_page()
    page.goto(f"{address}/concepts.html")
    ink = "getComputedStyle(document.querySelector('svg.drawing rect + text')).fill"
    seen = {}
    for _ in range(3):  # the theme of the system, then light, then dark, in some order
        seen[page.evaluate("document.body.dataset.theme")] = page.evaluate(ink)
        page.locator("button.theme-toggle:visible").first.click()
    assert set(seen) == {"auto", "light", "dark"}
    assert seen["auto"] == seen["light"] != seen["dark"]
    context.close()
