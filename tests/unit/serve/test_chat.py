"""Chat on the page of a run: who may ask, and the process that answers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from make_run import healthy
from phalanx.run import Run
from phalanx.serve.access import make_access
from phalanx.serve.chat_routes import ChatProcess
from phalanx.serve.chat_worker import ChatMessage, ChatRequest
from phalanx.serve.run_index import RunIndex
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


def test_an_answer_is_streamed_and_one_that_was_left_stops(tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_huggingface")
    tiny.save_chat_model(tmp_path / "model", TEMPLATE)
    chat, location = ChatProcess(), str(tmp_path / "model")

    def ask(text: str, max_tokens: int) -> AsyncGenerator[str, None]:
        request = ChatRequest([ChatMessage("user", text)], max_tokens)
        return cast(AsyncGenerator[str, None], chat.stream_answer(location, request))

    async def read(events: AsyncGenerator[str, None]) -> list[dict[str, Any]]:
        return [json.loads(event.removeprefix("data: ")) async for event in events]

    async def talk() -> None:
        first = await read(ask("Hi", 5))
        assert first[-1] == {"done": True}
        assert sum("text" in reply for reply in first) >= 1
        left = ask("Hi", 10**6)
        await anext(left)
        await left.aclose()
        assert await read(ask("Hi", 5)) == first
        too_long = await read(ask("long" * 1000, 5))
        assert "shorten it" in too_long[0]["error"]
        assert chat._process is not None
        chat._process.kill()
        await chat._process.wait()
        assert await read(ask("Hi", 5)) == first
        chat._process.kill()
        await chat._process.wait()

    asyncio.run(talk())
