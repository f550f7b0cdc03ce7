"""Chat on the page of a run: who may ask, and the process that answers."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from make_run import healthy
from phalanx.run import Run
from phalanx.serve.access import make_access
from phalanx.serve.chat_worker import ChatMessage, ChatRequest
from phalanx.serve.run_index import RunIndex
from phalanx.serve.run_routes import ChatProcess
from serve_browser import Browser

TOKEN = "a-token-for-the-test"
HI = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(healthy(tmp_path / "run"))
    run.companions.mkdir()
    (run.companions / "chat_template.jinja").write_text(TEMPLATE)
    return run


def page_address(run: Run) -> str:
    index = RunIndex([run.path.parent])
    index.update()
    return f"/run/{next(iter(index.rows))}"


def test_only_a_run_with_a_template_has_a_chat(run: Run) -> None:
    browser = Browser(run.path.parent, make_access("127.0.0.1", True, TOKEN))
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert 'id="chat"' in browser.get(page_address(run), **bearer).text
    (run.companions / "chat_template.jinja").unlink()
    assert "Chat" not in browser.get(page_address(run), **bearer).text


def test_a_browser_that_may_not_act_may_not_ask(run: Run) -> None:
    read_only = Browser(run.path.parent, make_access("127.0.0.1", False, None, demands_token=False))
    assert "--allow-actions" in read_only.get(page_address(run)).text
    assert read_only.post(f"{page_address(run)}/chat", HI).status == 403
    acting = Browser(run.path.parent, make_access("127.0.0.1", True, TOKEN))
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert acting.post(f"{page_address(run)}/chat", HI).status == 403
    assert acting.post(f"{page_address(run)}/chat", HI, origin="http://evil.example", **bearer).status == 403
    answer = acting.post(f"{page_address(run)}/chat", '{"messages": 3}', **bearer)
    assert (answer.status, "messages" in answer.text) == (400, True)


WORKER = """
import itertools, json, os, signal, sys
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
for line in sys.stdin:
    stopped.clear()
    text = json.loads(line)["messages"][-1]["content"]
    if text == "exit":
        os._exit(3)
    for number in itertools.count() if text == "endless" else range(2):
        print(json.dumps({"text": f"{text} {number} of {sys.argv[1]}"}), flush=True)
        if stopped:
            break
    print('{"done": true}', flush=True)
"""


def ask(chat: ChatProcess, location: str, text: str) -> AsyncGenerator[str, None]:
    request = ChatRequest([ChatMessage("user", text)], max_tokens=5)
    return cast(AsyncGenerator[str, None], chat.stream_answer(location, request))


async def read(events: AsyncGenerator[str, None]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) async for event in events]


async def end(chat: ChatProcess) -> None:
    assert chat._process is not None
    chat._process.kill()
    await chat._process.wait()


def test_an_answer_that_was_left_stops_and_the_next_one_is_whole() -> None:
    async def talk() -> None:
        chat = ChatProcess((sys.executable, "-c", WORKER))
        endless = ask(chat, "a", "endless")
        assert "endless 0 of a" in await anext(endless)
        await endless.aclose()
        assert await read(ask(chat, "a", "Hi")) == [{"text": "Hi 0 of a"}, {"text": "Hi 1 of a"}, {"done": True}]
        assert (await read(ask(chat, "b", "Hi")))[0] == {"text": "Hi 0 of b"}
        (reply,) = await read(ask(chat, "b", "exit"))
        assert "exit code 3" in reply["error"]
        assert len(await read(ask(chat, "b", "Hi"))) == 3
        await end(chat)

    asyncio.run(talk())


def test_the_process_answers_with_a_model(tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_huggingface")
    tiny.save_chat_model(tmp_path / "model", TEMPLATE)

    async def talk() -> None:
        chat = ChatProcess()
        replies = await read(ask(chat, str(tmp_path / "model"), "Hi"))
        assert [*replies[-2], *replies[-1]] == ["note", "done"]
        assert any("text" in reply for reply in replies)
        refused, done = await read(ask(chat, str(tmp_path / "model"), "long" * 1000))
        assert "shorten it" in refused["error"]
        assert done == {"done": True}
        await end(chat)

    asyncio.run(talk())
