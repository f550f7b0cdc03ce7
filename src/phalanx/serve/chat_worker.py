"""The process that answers messages for a page: it has torch and the model, which the server has not.

It reads a `ChatRequest` from each line of standard input and writes lines of JSON: pieces of the answer (`text`), notes
on it (`note`), errors (`error`), and in the end DONE_LINE. SIGINT stops an answer. It ends with its standard input, and
when nothing was asked for IDLE_TIMEOUT_S, which frees the model's memory.
"""

import json
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter

from phalanx.errors import PhalanxError

IDLE_TIMEOUT_S = 900
DONE_LINE = '{"done": true}'


@dataclass(frozen=True)
class ChatMessage:
    """A message of a dialogue."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class ChatRequest:
    """A dialogue to answer."""

    messages: list[ChatMessage]
    max_tokens: int = 500


REQUEST_ADAPTER = TypeAdapter(ChatRequest)


def answer_requests(location: str) -> None:
    """Answer the requests of standard input with the model of a run."""
    from phalanx.app.evaluate import CheckpointSelection
    from phalanx.app.generate import SamplingOptions, TextModel, answer_dialogue, fit_dialogue, load_text_model

    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the server has ended
    text_model: TextModel | None = None
    signal.alarm(IDLE_TIMEOUT_S)  # ends the process
    for line in sys.stdin:
        signal.alarm(0)
        stopped.clear()
        request = REQUEST_ADAPTER.validate_json(line)
        try:
            text_model = text_model or load_text_model(location, CheckpointSelection())
            dialogue = fit_dialogue(text_model, list(map(asdict, request.messages)), request.max_tokens)
            sampling = SamplingOptions(request.max_tokens)
            for piece in answer_dialogue(text_model, dialogue, sampling, lambda note: _send("note", note)):
                if stopped.is_set():
                    break
                _send("text", piece)
        except PhalanxError as error:
            _send("error", str(error))
        print(DONE_LINE, flush=True)
        signal.alarm(IDLE_TIMEOUT_S)


def _send(kind: Literal["text", "note", "error"], text: str) -> None:
    print(json.dumps({kind: text}), flush=True)


if __name__ == "__main__":
    answer_requests(sys.argv[1])
