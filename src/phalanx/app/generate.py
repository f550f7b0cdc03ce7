"""Generate text with a language model from a run's checkpoint."""

import codecs
from collections.abc import Iterator

import torch

from phalanx.app.trained_model import CheckpointSelection, ReportWarning, load_model
from phalanx.data import Tokenizer, load_tokenizer
from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.train.inference import SamplingOptions as SamplingOptions
from phalanx.train.inference import generate_tokens


def generate_text(
    run: Run,
    selection: CheckpointSelection,
    prompt: str,
    sampling: SamplingOptions,
    warn: ReportWarning = lambda text: None,
) -> Iterator[str]:
    """Load the selected checkpoint, and return the pieces of text that continue `prompt`, as they are generated.

    Args:
        prompt: at least one token.
        warn: called for what of the run is lost or damaged.

    Raises:
        UsageError: the run has no such checkpoint, its model is no language model, or the prompt is empty.
        DataError: the checkpoint is damaged, or the tokenizer is not that of the training.
    """
    device = torch.device("cpu")
    trained = load_model(run, selection, device, warn)
    facts = trained.facts
    if facts.kind != "tokens" or facts.seq_len is None:
        raise UsageError(f"{run.path}: this run's model does not write text; it was trained on {facts.kind}")
    tokenizer = load_tokenizer(run.tokenizer if run.tokenizer.exists() else "bytes")
    if tokenizer.vocab_size != facts.vocab_size:
        what = f"has {tokenizer.vocab_size:,} tokens" if run.tokenizer.exists() else "is missing"
        raise DataError(f"{run.tokenizer}: {what}, and the model was trained on {facts.vocab_size:,} tokens")
    prompt_tokens = [int(token) for token in tokenizer.encode(prompt)]
    if not prompt_tokens:
        raise UsageError("--prompt: give at least one character to continue")
    tokens = generate_tokens(
        trained.model,
        prompt_tokens,
        sampling,
        facts.seq_len,
        device,
    )
    return decode_incrementally(tokenizer, tokens)


def decode_incrementally(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Decode tokens one by one. A token may end within a character, which is then held back until it is whole."""
    if tokenizer.name == "bytes":
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(bytes([token]))
        return
    # The text of a byte-pair token depends on those before it: decode all, and return what is new.
    decoded, produced = "", list[int]()
    for token in tokens:
        produced.append(token)
        text = tokenizer.decode(produced)
        if not text.endswith("\ufffd"):
            yield text[len(decoded) :]
            decoded = text
