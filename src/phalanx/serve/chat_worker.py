"""The process that answers messages for a page: it has torch and the model, which the server has not.

It reads a `ChatRequest` from each line of standard input and writes lines of `ChatReply`, the last of them done. SIGINT
stops an answer. It ends with its standard input, and when nothing was asked for IDLE_TIMEOUT_S, which frees the model's
memory.
"""

import signal
import sys
import threading
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from phalanx.errors import PhalanxError

IDLE_TIMEOUT_S = 900


@dataclass(frozen=True)
class ChatMessage:
    """A message of a dialogue."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class ChatRequest:
    """A dialogue to answer, and how."""

    messages: list[ChatMessage]
    max_tokens: int = 500
    temperature: float = 0.8


@dataclass(frozen=True)
class ChatReply:
    """A piece of an answer, a note on it, or an error; `done` in the last one."""

    text: str = ""
    note: str = ""
    error: str = ""
    done: bool = False


REQUESTS, REPLIES = TypeAdapter(ChatRequest), TypeAdapter(ChatReply)
"""They check and write JSON."""


def write_reply(reply: ChatReply) -> str:
    """Return a reply as one line of JSON."""
    return REPLIES.dump_json(reply, exclude_defaults=True).decode()


def answer_requests(location: str) -> None:
    """Answer the requests of standard input with the model of a run."""
    from phalanx.app.dialogue import answer_dialogue, fit_dialogue
    from phalanx.app.evaluate import CheckpointSelection
    from phalanx.app.generate import SamplingOptions, TextModel, load_text_model

    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    text_model: TextModel | None = None
    signal.alarm(IDLE_TIMEOUT_S)  # ends the process
    for line in sys.stdin:
        signal.alarm(0)
        stopped.clear()
        request = REQUESTS.validate_json(line)
        try:
            text_model = text_model or load_text_model(location, CheckpointSelection())
            messages = [{"role": message.role, "content": message.content} for message in request.messages]
            dialogue = fit_dialogue(text_model, messages, request.max_tokens)
            sampling = SamplingOptions(request.max_tokens, request.temperature)
            for piece in answer_dialogue(text_model, dialogue, sampling, lambda note: _send(ChatReply(note=note))):
                if stopped.is_set():
                    break
                _send(ChatReply(text=piece))
        except PhalanxError as error:
            _send(ChatReply(error=str(error)))
        _send(ChatReply(done=True))
        signal.alarm(IDLE_TIMEOUT_S)


def _send(reply: ChatReply) -> None:
    sys.stdout.write(write_reply(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    answer_requests(sys.argv[1])
