"""The UI in a real headless Chromium: click, keys, jump, what-if, permalink. Screenshots: tests/output."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_gateway import FakeGateway, demo
from playwright.sync_api import Browser, Request, sync_playwright

from replay_ui.serve import command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OUTPUT = Path(__file__).parent / "output"
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def fake() -> FakeGateway:
    return demo(long=True)


@pytest.fixture(scope="module")
def ui(fake: FakeGateway) -> Iterator[str]:
    """The real UI process in front of a gateway without models."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with fake.serving() as url, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command(port, url), stdout=log, stderr=log)
        try:
            base = f"http://127.0.0.1:{port}"
            with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
                assert client.get(f"{base}/_stcore/health", timeout=60).is_success
            yield base
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Reader:
    """One reader at 1280x800: opens pages, presses keys, looks."""

    def __init__(self, browser: Browser, base: str, scheme: str = "light") -> None:
        self.base = base
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.outside: list[str] = []
        self.page.on("request", self._watch)
        self.alerts: list[str] = []
        self.page.on("dialog", lambda dialog: (self.alerts.append(dialog.message), dialog.dismiss()))

    def _watch(self, request: Request) -> None:
        url = request.url
        if not url.startswith((self.base, self.base.replace("http", "ws"), "blob:", "data:")):
            self.outside.append(url)

    def open(self, path: str, wait: str = ".strip .t.on") -> None:
        self.page.goto(self.base + path)
        self.page.wait_for_selector(wait, timeout=60_000)

    def step(self, expected: int) -> None:
        """Both the panel (from Python) and the strip (in the browser) are at this step."""
        self.page.wait_for_selector(f".tt-title b:text-is('step {expected}')", timeout=20_000)
        self.page.wait_for_selector(".strip .t.on", timeout=20_000)
        assert self.page.locator(".strip .t.on").count() == 1

    def shot(self, name: str) -> None:
        OUTPUT.mkdir(exist_ok=True)
        self.page.screenshot(path=OUTPUT / f"{name}.png")


@pytest.fixture
def reader(browser: Browser, ui: str) -> Iterator[Reader]:
    reader = Reader(browser, ui)
    yield reader
    reader.context.close()


def test_a_click_and_the_keys_move_strip_and_panel(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-8f2c&step=17")
    reader.step(17)
    reader.page.locator(".strip .t", has_text="merge").first.click()
    reader.step(6)
    for key, expected in (
        ("ArrowRight", 7),
        ("ArrowLeft", 6),
        ("Shift+ArrowRight", 16),
        ("Shift+ArrowLeft", 6),
        ("End", 169),
        ("Home", 0),
    ):
        reader.page.keyboard.press(key)
        reader.step(expected)


def test_jump_keys_and_buttons_go_the_same_way(reader: Reader, fake: FakeGateway) -> None:
    _, columns = fake.traces["chatcmpl-8f2c"]
    idx, outcome = columns["idx"], columns["outcome"]
    recovered = [i for i, o in zip(idx, outcome, strict=True) if o == "recovered"]
    reader.open("/replay?trace=chatcmpl-8f2c")
    reader.step(0)
    reader.page.keyboard.press("r")
    reader.step(recovered[0])
    reader.page.get_by_role("button", name="rejection R").click()
    reader.step(recovered[1])
    reader.page.keyboard.press("Shift+R")
    reader.step(recovered[0])
    reader.page.keyboard.press("m")
    reader.step(idx[columns["gap"].index(min(columns["gap"]))])


def test_typing_into_a_field_does_not_move_the_strip(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-8f2c&step=17")
    field = reader.page.locator(".st-key-r_find input")
    field.click()
    field.type("large merge")
    reader.step(17)


def test_play_walks_on_and_space_stops_it(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-8f2c&step=17")
    reader.step(17)
    reader.page.keyboard.press(" ")
    reader.page.wait_for_selector(".legend:has-text('playing')")
    reader.page.wait_for_function(
        "() => /step (2[0-9]|3[0-9])/.test(document.querySelector('.tt-title b').textContent)"
    )
    reader.page.keyboard.press(" ")
    reader.page.wait_for_selector(".legend:not(:has-text('playing'))")


def test_the_address_restores_the_view_and_follows_the_reader(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-8f2c&step=37&colour=gap&drafts=1&zoom=10-80&threshold=0.8")
    reader.step(37)
    reader.page.keyboard.press("ArrowRight")
    reader.step(38)
    reader.page.wait_for_url(re.compile("step=38"))
    address = reader.page.url
    for part in ("colour=gap", "drafts=1", "zoom=10-80", "threshold=0.8"):
        assert part in address
    reader.page.goto("about:blank")
    reader.page.goto(address)
    reader.step(38)
    assert reader.page.locator(".strip[data-colour=gap].drafts").count() == 1
    assert reader.page.locator(".strip .elided").first.text_content().startswith("… 10 earlier rows")
    assert reader.page.locator(".st-key-r_w_threshold").get_by_text("0.80").count() == 1


def test_what_if_greys_all_after_the_first_flip(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-trust&threshold=0.9")
    reader.page.wait_for_selector(".strip .t.after", timeout=30_000)
    states = reader.page.locator(".strip .t").evaluate_all(
        "all => all.map(t => t.classList.contains('after'))"
    )
    first = states.index(True)
    assert first > 0
    assert all(states[first:])
    assert reader.page.locator(".strip .t.flip").first.evaluate("t => Number(t.dataset.p)") == first - 1
    assert "fork to see it" in reader.page.locator(".legend").text_content()


def test_what_if_under_exact_greys_nothing_and_says_why(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-8f2c&threshold=0.9")
    reader.page.wait_for_selector(".strip .t.flip", timeout=30_000)
    assert reader.page.locator(".strip .t.after").count() == 0
    assert "Under exact the text stays the same" in reader.page.locator(".legend").text_content()


def test_the_plot_zooms_the_strip(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-8f2c&step=60")
    reader.step(60)
    box = reader.page.locator(".plot canvas").bounding_box()
    y = box["y"] + box["height"] / 2
    reader.page.mouse.move(box["x"] + box["width"] * 0.3, y)
    reader.page.mouse.down()
    reader.page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=5)
    reader.page.mouse.up()
    reader.page.wait_for_selector(".strip .t.out", state="attached")
    reader.page.wait_for_url(re.compile("zoom="))
    reader.page.mouse.dblclick(box["x"] + box["width"] * 0.5, y)
    reader.page.wait_for_selector(".strip .t.out", state="detached")


def test_fork_opens_compare_at_the_divergence(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-8f2c&step=37")
    reader.step(37)
    reader.page.keyboard.press("f")
    dialog = reader.page.get_by_role("dialog")
    dialog.wait_for(timeout=20_000)
    dialog.locator("input[aria-label='or type one token']").fill(" joins")
    dialog.locator("input[aria-label='or type one token']").press("Enter")
    dialog.get_by_role("button", name="Run").click()
    reader.page.wait_for_selector("text=They part at step 37", timeout=30_000)
    assert reader.page.locator(".strip").count() == 2


def test_hostile_text_runs_nothing(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-hostile&step=0")
    for _ in range(10):
        reader.page.keyboard.press("ArrowRight")
    reader.step(10)
    reader.page.locator("summary", has_text="prompt").click()
    assert reader.alerts == []
    assert reader.page.locator(".strip img, .strip script, .tt-card img, .tt-prompt script").count() == 0
    reader.shot("replay-hostile")


def test_ten_thousand_tokens_scroll_smoothly(reader: Reader) -> None:
    reader.open("/replay?trace=chatcmpl-long&step=5000")
    reader.step(5000)
    measured = reader.page.locator(".strip").evaluate(
        """async (box) => {
          const times = [];
          let last = performance.now();
          for (let i = 0; i < 120; i += 1) {
            box.scrollTop += 90;
            await new Promise((next) => requestAnimationFrame(next));
            times.push(performance.now() - last);
            last = performance.now();
          }
          times.sort((a, b) => a - b);
          return { tokens: box.querySelectorAll(".t").length, median: times[60] };
        }"""
    )
    assert measured["tokens"] >= 10_000
    assert measured["median"] < 34


def test_every_page_opens_in_both_colour_schemes_and_asks_nobody_else(
    browser: Browser, ui: str, scheme: str
) -> None:
    reader = Reader(browser, ui, scheme)
    for name, path, wait in (
        ("replay", "/replay?trace=chatcmpl-8f2c&step=39&drafts=1", ".strip .t.on"),
        ("replay-gap", "/replay?trace=chatcmpl-8f2c&step=39&colour=gap&threshold=0.8", ".strip .t.flip"),
        ("traces", "/", "tbody tr"),
        ("compare", "/compare?a=chatcmpl-8f2c&b=chatcmpl-other", ".strip .t.flip"),
        ("advisor", "/advisor", ".stVegaLiteChart"),
        ("live", "/live", ".tt-tiles"),
        ("reviews", "/reviews", ".tt-answer"),
        ("rollouts", "/rollouts", ".tt-evidence"),
        ("alerts", "/alerts", ".tt-table"),
    ):
        reader.open(path, wait)
        reader.page.wait_for_timeout(700)
        reader.shot(f"{name}-{scheme}")
        width = reader.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 1280, f"{name} is cut at the right"
    assert reader.outside == []
    reader.context.close()


def test_a_row_of_traces_opens_replay_and_back_returns(reader: Reader) -> None:
    reader.open("/", "tbody tr")
    reader.page.locator("tbody tr", has_text="merges two sorted").first.click()
    reader.page.wait_for_selector(".strip .t.on", timeout=30_000)
    assert "/replay?trace=" in reader.page.url
    reader.page.go_back()
    reader.page.wait_for_selector("tbody tr", timeout=30_000)


def test_the_real_gateway_and_ui_by_one_command(browser: Browser, tmp_path: Path) -> None:
    """`tokentape serve --preset tiny`: an answer, its tokens in Replay, and what-if over the real API."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, ui_port = one.getsockname()[1], two.getsockname()[1]
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--preset", "tiny", "--port", str(port)]
    argv += ["--ui-port", str(ui_port), "--data-dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready ")
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 60,
                "routing": {"accept": "trust", "threshold": 0.3},
            }
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120)
            reader = Reader(browser, f"http://127.0.0.1:{ui_port}")
            trace = answer.headers["x-request-id"]
            with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
                assert client.get(f"{reader.base}/_stcore/health", timeout=60).is_success
            reader.open(f"/replay?trace={trace}&step=20&threshold=0.99")
            reader.step(20)
            reader.page.wait_for_selector(".strip .t.flip", timeout=30_000)
            assert "decided anew: the same" in reader.page.content() or "No rule" in reader.page.content()
            reader.shot("replay-real-gateway")
            reader.context.close()
        finally:
            process.terminate()
            process.wait(60)
