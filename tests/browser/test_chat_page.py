"""The chat of a run's page in a real browser, with a stand-in for the process that has the model."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from chromium import Page
from make_run import healthy
from phalanx.run import Run
from phalanx.serve.access import make_access
from phalanx.serve.run_routes import ChatProcess
from serve_browser import Browser
from serve_process import find_violations, wait_until

TOKEN = "a-token-for-the-test"
WORKER = """
import itertools, json, signal, sys
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
for line in sys.stdin:
    stopped.clear()
    asked = [message["content"] for message in json.loads(line)["messages"]]
    for text in itertools.repeat("on ") if asked[-1] == "endless" else [f"<b>{len(asked)}</b> ", asked[-1]]:
        print(json.dumps({"text": text}), flush=True)
        if stopped:
            break
    print('{"done": true}', flush=True)
"""
LINES = "[...document.querySelectorAll('#chat p')].map((line) => `${line.className}: ${line.textContent}`)"
IS_IDLE = "document.querySelectorAll('#chat button')[1].disabled"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    run = Run(healthy(tmp_path / "run"))
    run.companions.mkdir()
    (run.companions / "chat_template.jinja").write_text("{{ messages }}")
    pages = Browser(tmp_path, make_access("127.0.0.1", True, TOKEN)).server
    pages.run_routes.chat = chat = ChatProcess((sys.executable, "-c", WORKER))
    server = uvicorn.Server(uvicorn.Config(pages.make_app(), port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/run/{next(iter(pages.index.rows))}?token={TOKEN}"
    assert chat._process is not None
    os.kill(chat._process.pid, signal.SIGKILL)  # it would outlive its server, which is a thread here
    pages.stopping.set()
    server.should_exit = True
    thread.join()


def test_a_question_is_answered_stopped_and_forgotten(browser: str, address: str) -> None:
    with Page(browser) as page:
        page.visit(address)
        wait_until(lambda: page.evaluate("document.getElementById('chat') !== null"))

        def ask(text: str) -> None:
            page.evaluate(f"document.querySelector('#chat textarea').value = '{text}'")
            page.evaluate("document.querySelector('#chat form').requestSubmit()")

        ask("Hi")
        wait_until(lambda: page.evaluate(f"{LINES}.length === 2 && {IS_IDLE}"))
        assert page.evaluate(LINES) == ["user: Hi", "assistant: <b>1</b> Hi"]
        ask("endless")
        wait_until(lambda: page.evaluate(f"{LINES}.at(-1).endsWith('on on ')"))
        page.evaluate("document.querySelectorAll('#chat button')[1].click()")
        wait_until(lambda: page.evaluate(IS_IDLE))
        ask("And")
        wait_until(lambda: page.evaluate(f"{LINES}.at(-1) === 'assistant: <b>5</b> And'"))
        assert find_violations(page) == []
        page.evaluate("document.querySelectorAll('#chat button')[2].click()")
        assert page.evaluate(LINES) == []
        ask("Hi")
        wait_until(lambda: page.evaluate(f"{LINES}.at(-1) === 'assistant: <b>1</b> Hi'"))
        assert page.messages == []
