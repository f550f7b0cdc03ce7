"""Use a run's checkpoint: evaluate it on its validation set, or generate text with a language model."""

import codecs
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from phalanx.data import Tokenizer, open_data
from phalanx.data.tokenizers import load_run_tokenizer, show_control_token
from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.distributed.mesh import make_single_worker_mesh
from phalanx.train.evaluation import EvaluationResult, evaluate
from phalanx.train.inference import SamplingOptions as SamplingOptions
from phalanx.train.inference import TrainedModel, check_data, generate_tokens, given_device, load_trained_model
from phalanx.train.loss import LossFn, LossModule
from phalanx.train.preference_reference import load_reference
from phalanx.train.tasks import Classification, load_task
from phalanx.train.tasks.preference import Preference

ReportWarning = Callable[[str], None]


@dataclass(frozen=True)
class CheckpointSelection:
    """Which checkpoint of a run to load: that of `step`, the best, or by default the newest good one."""

    step: int | None = None
    best: bool = False
    trust_code: bool = False
    """Import the run's code even if this user has not trained with it."""


def load_model(run: Run, selection: CheckpointSelection, device: torch.device, warn: ReportWarning) -> TrainedModel:
    """Load the model in evaluation mode; call `warn` for what of the run is lost or damaged."""
    trained = load_trained_model(run, selection.step, selection.best, device, selection.trust_code)
    for note in trained.notes:
        warn(note)
    return trained


@dataclass(frozen=True)
class CheckpointScores:
    """What a checkpoint scores on the validation set."""

    checkpoint: str
    task: str
    result: EvaluationResult


def evaluate_run(
    run: Run,
    selection: CheckpointSelection,
    device: str | None = None,
    max_samples: int | None = None,
    warn: ReportWarning = lambda text: None,
) -> CheckpointScores:
    """Evaluate the selected checkpoint in this process.

    Args:
        device: default: the `device` of the run's recipe.
        max_samples: default: the whole validation set.
        warn: called for what of the run is lost or damaged.

    Raises:
        UsageError: the run has no such checkpoint, or no validation set.
        DataError: the checkpoint or the data are damaged.
    """
    dist_env = dist_env_from_environment({}, device or given_device(run))
    trained = load_model(run, selection, dist_env.device, warn)
    recipe = trained.recipe
    check_data(recipe)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    if data.num_validation_samples == 0:
        raise UsageError(
            f"{run.location}: no validation set (evaluation.holdout_fraction = 0 and no evaluation.source)"
        )
    task = load_task(recipe.task, trained.folder)
    if isinstance(task, Classification):
        task.normalization = trained.image_normalization
    if isinstance(task, Preference):
        task.reference = load_reference(run, data.fingerprint)
    result = evaluate(
        LossModule(trained.model, LossFn(task, recipe.precision, dist_env.device)),
        data,
        dist_env=dist_env,
        mesh=make_single_worker_mesh(),
        max_samples=max_samples or data.num_validation_samples,
        micro_size=recipe.batch.micro_size,
    )
    assert result is not None  # nothing asks it to stop
    return CheckpointScores(trained.checkpoint.name, recipe.task_kind, result)


def generate_text(
    run: Run,
    selection: CheckpointSelection,
    prompt: str,
    sampling: SamplingOptions,
    warn: ReportWarning = lambda text: None,
    *,
    ignore_end: bool = False,
    report_stop: Callable[[str], object] = lambda text: None,
) -> Iterator[str]:
    """Load the selected checkpoint, and return the pieces of text that continue `prompt`, as they are generated, up to
    the end of the text.

    Args:
        prompt: at least one token. It begins as documents do; names of control tokens in it are these tokens.
        warn: called for what of the run is lost or damaged.
        ignore_end: continue behind the end of a text, which is shown as the name of its token in brackets.
        report_stop: called where the text ended before `sampling.num_tokens`.

    Raises:
        UsageError: the run has no such checkpoint, its model is no language model, or the prompt is empty.
        DataError: the checkpoint is damaged, or the tokenizer is not that of the training.
    """
    device = torch.device("cpu")
    trained = load_model(run, selection, device, warn)
    facts = trained.facts
    if facts.kind != "tokens" or facts.seq_len is None:
        raise UsageError(f"{run.location}: this run's model does not write text; it was trained on {facts.kind}")
    described = run.read_json_or_empty(run.plan).get("tokenizer")
    tokenizer = load_run_tokenizer(run.tokenizer, described)
    if tokenizer.vocab_size != facts.vocab_size:
        what = f"has {tokenizer.vocab_size:,} tokens" if run.tokenizer.exists() else "is missing"
        raise DataError(f"{run.tokenizer}: {what}, and the model was trained on {facts.vocab_size:,} tokens")
    prompt_tokens = tokenizer.encode_prompt(prompt)
    if not prompt_tokens:
        raise UsageError("--prompt: give at least one character to continue")
    tokens = generate_tokens(trained.model, prompt_tokens, sampling, facts.seq_len, device)
    stops = described.get("stops") if isinstance(described, dict) else None
    ends = {tokenizer.separator_token, *(stops if isinstance(stops, list) else [])} - {None}
    if ignore_end:
        return decode_incrementally(tokenizer, tokens, ends)

    def report(token: int, count: int) -> None:
        if count < sampling.num_tokens:
            name = tokenizer.control_tokens.get(token, f"token {token}")
            report_stop(f"the text ended with {name} after {count} tokens; --ignore-eos continues behind it")

    return decode_incrementally(tokenizer, _until_end(tokens, ends, report))


def _until_end(tokens: Iterator[int], ends: Collection[int], report: Callable[[int, int], None]) -> Iterator[int]:
    """Return the tokens before the first that ends a text; report that one, and how many tokens there are with it."""
    for count, token in enumerate(tokens, 1):
        if token in ends:
            report(token, count)
            return
        yield token


def decode_incrementally(
    tokenizer: Tokenizer, tokens: Iterator[int], ends: Collection[int] = frozenset()
) -> Iterator[str]:
    """Decode tokens one by one, and show those that end a text. A token may end within a character, which is then held
    back until it is whole, or the text is over."""
    decoder = _IncrementalDecoder(tokenizer)
    for token in tokens:
        if token in ends:
            yield decoder.finish()
            yield show_control_token(tokenizer.control_tokens.get(token, str(token)))
        else:
            yield decoder.decode(token)
    if rest := decoder.finish():
        yield rest


class _IncrementalDecoder:
    """Decodes one text after the other."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bytes_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tokens: list[int] = []
        self._decoded = ""

    def decode(self, token: int) -> str:
        """Return the characters that are whole with this token."""
        if self._tokenizer.name == "bytes":
            return self._bytes_decoder.decode(bytes([token]))
        self._tokens.append(token)
        # The text of a byte-pair token depends on those before it: decode all, and return what is new.
        text = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._take(text)

    def finish(self) -> str:
        """Return what is left of a text."""
        if self._tokenizer.name == "bytes":
            return self._bytes_decoder.decode(b"", final=True)
        rest = self._take(self._tokenizer.decode(self._tokens))
        self._tokens, self._decoded = [], ""
        return rest

    def _take(self, text: str) -> str:
        new, self._decoded = text[len(self._decoded) :], text
        return new
