"""A chat page that people use, in a browser: gradio's, which speaks OpenAI's API.

``pip install gradio playwright`` and a Chromium have it run; no other test needs them.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve import NAME, TIMEOUT_S, ScriptedRows, Served
from tests.serve.conftest import Tiny

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TIMEOUT_MS = 1000 * TIMEOUT_S
SHOW = """
import sys, threading, gradio
chat = gradio.load_chat(sys.argv[1], model=sys.argv[2], token="none")
print(chat.launch(prevent_thread_lock=True, quiet=True)[1], flush=True)
threading.Event().wait()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]


@pytest.fixture
def page(scripted: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A page of gradio's chat in front of the server."""
    playwright: Any = pytest.importorskip("playwright.sync_api")
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("needs gradio")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    command = [sys.executable, "-c", SHOW, scripted.url, NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as chat:
        try:
            assert chat.stdout
            url = chat.stdout.readline().strip()
            with playwright.sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = browser.new_page()
                page.set_default_timeout(TIMEOUT_MS)
                page.goto(url)
                yield page
                browser.close()
        finally:
            chat.kill()


def test_a_chat_page(page: Any, scripted: Served, rows: ScriptedRows, tiny: Tiny) -> None:
    for number, said in enumerate(("Größe: 5 µm, ✓ 日本 🙂.", "It rains.")):
        rows.script[:-1] = tiny.tokenizer(said).input_ids
        box = page.get_by_role("textbox").last
        box.fill(f"question {number}")
        box.press("Enter")
        page.get_by_text(said).wait_for()
    assert page.get_by_text("question 0").first.is_visible()
    assert not scripted.faults
