"""Prove an export: compute with the checkpoint's model before anything is written, reload what was written in a process
of its own, and compare, on samples of the run's own data, on the CPU in fp32."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.app.evaluate import score_model
from phalanx.data import IGNORE_INDEX, RunData, open_data
from phalanx.data.chat_images import IMAGE_INPUT, pack_files
from phalanx.data.tokenizers import load_run_tokenizer
from phalanx.errors import DataError, PhalanxError, UsageError
from phalanx.recipe.imports import huggingface_location
from phalanx.run import Run
from phalanx.run.call_process import CallProcess, value_of
from phalanx.run.companions import TOKENIZER_CONFIG_FILE
from phalanx.run.process_messages import CallRaised, CallReturned
from phalanx.train.checkpoint.compressed_tensors import INT4_FORM, Int4AwareLinear, QuantizedForm, load_export
from phalanx.train.checkpoint.format import read_manifest
from phalanx.train.checkpoint.gguf import GGUF_FILE
from phalanx.train.checkpoint.pruning import PruningPlan, PruningRequest, find_family, plan_pruning
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.hf import reload
from phalanx.train.hf.reload import (
    ProofCheck,
    ReloadReply,
    ReloadRequest,
    TextFacts,
    compute_scores,
    reload_with_llama_cpp,
)
from phalanx.train.inference import TrainedModel, check_data, load_trained_model
from phalanx.train.tasks import Classification, LanguageModeling
from phalanx.train.tasks.texts import split_texts

NUM_TOKENS, MAX_SAMPLE_TOKENS, NUM_IMAGES = 1024, 256, 32
NUM_PROMPTS, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 3, 16, 64
PROBE_TEXT = "Hello, world! 12345 äöü 漢字\n\tx = [1, 2]  # end"
SAME_WEIGHTS_TOLERANCE, ROUNDED_INPUTS_TOLERANCE = 1e-4, 0.02
"""Difference of two computations with the same weights in fp32, as a share of the largest score; and for layers that
round their inputs, where one that lies between two numbers may become either."""
DTYPE_TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
"""What rounding weights to a dtype may change: scores (root mean square) and the loss, relative to themselves."""
LLAMA_CPP_TOLERANCE = 0.002
"""The least of these with llama.cpp, which has tables of fp16 for some functions, such as GELU."""


@dataclass(frozen=True)
class Reference:
    """What the checkpoint's model computes of a few samples. `inputs` are tokens [n, s] or pixel values, `targets`
    tokens [n, s] or classes [n], `scores` logits or hidden states."""

    build: str
    inputs: Tensor
    targets: Tensor
    images: Tensor | None
    scores: Tensor
    has_loss: bool
    text: TextFacts | None
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    """Image inputs of a vision-language model, by the names of a batch, and the packed `files` that they come from."""
    pruning: PruningPlan | None = None
    pruning_checks: Sequence[ProofCheck] = ()


def compute_reference(
    run: Run,
    step: int,
    trust_code: bool,
    weights: str | None = None,
    form: QuantizedForm | None = None,
    request: PruningRequest | None = None,
) -> Reference:
    """Compute what the export of a checkpoint in a form is compared with, pruned by a `request`. Weights are rounded
    only if the model was trained for this form. Raises UsageError or DataError where the run's model or data cannot be
    used."""
    try:
        trained = load_trained_model(run, step, False, torch.device("cpu"), trust_code, weights)
        check_data(trained.recipe)
    except PhalanxError as error:
        raise type(error)(f"{error}; the proof of an export needs it, or export with --no-verify") from None
    for layer in (module for module in trained.model.modules() if isinstance(module, Int4AwareLinear)):
        layer.rounds_weight = form is INT4_FORM
    data = open_data(trained.recipe.data, trained.recipe.evaluation, trained.recipe.seed)
    pruning, pruning_checks = (None, []) if request is None else prune_trained(trained, data, request)
    is_text, num_validation = trained.facts.kind == "tokens", data.num_validation_samples
    count = NUM_TOKENS // min(trained.facts.seq_len or NUM_TOKENS, MAX_SAMPLE_TOKENS) if is_text else NUM_IMAGES
    count = min(count, num_validation or data.num_train_samples)
    first = 0
    width = MAX_SAMPLE_TOKENS
    files: list[bytes] = []
    if data.has_images:  # one sample with images, whole: its tokens and its images belong together
        files_of = [data.read_files(number, bool(num_validation)) for number in range(count)]
        first = next((number for number, each in enumerate(files_of) if each), 0)
        count = 1
        width = trained.facts.seq_len or 0
        files = files_of[first]
    batch = data.read_validation(first, count) if num_validation else data.read_training(first, count)
    tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
    vision = {name: tensor for name, tensor in tensors.items() if name.startswith(IMAGE_INPUT)}
    if files:
        vision["files"] = torch.frombuffer(bytearray(pack_files(files).tobytes()), dtype=torch.uint8)
    if "sequences" in tensors:
        tokens, mask, _ = split_texts(tensors)
        inputs = tokens[:count, : min(MAX_SAMPLE_TOKENS, int(mask.sum(1).min()))].contiguous()
        targets = tensors.get("labels", inputs)  # of classes; of others there is no loss
    elif is_text:
        inputs, targets = (tensors[name][:, :width].contiguous() for name in ("tokens", "targets"))
    else:
        task = Classification()
        task.normalization = trained.image_normalization
        (inputs,), targets = task.inputs(tensors)[0], tensors["labels"]
    scores, has_logits = compute_scores(trained.model, inputs, vision)
    has_loss = has_logits and targets.shape == scores.shape[:-1]
    text = _describe_text(run, inputs) if is_text and run.tokenizer.is_file() else None
    build, images = trained.recipe.model.build, tensors.get("images")
    return Reference(build, inputs, targets, images, scores, has_loss, text, vision, pruning, pruning_checks)


NUM_SAMPLES = 128
"""Training samples that decide what is kept."""


def prune_trained(
    trained: TrainedModel, data: RunData, request: PruningRequest
) -> tuple[PruningPlan, list[ProofCheck]]:
    """Choose by training samples what is kept, and mask the rest in the model. Return the choice, what it keeps of the
    importance, and the loss of the validation set before and after. Raises UsageError if there is no such set, or the
    model has less than is asked for."""
    if not data.num_validation_samples:
        raise UsageError("pruning measures the validation loss, and the run has no validation set")
    before = _compute_validation_loss(trained, data)
    samples = range(min(NUM_SAMPLES, data.num_train_samples))
    inputs = (torch.from_numpy(data.read_training(number, 1)["tokens"]) for number in samples)
    plan = plan_pruning(trained.model, find_family(read_manifest(trained.checkpoint).meta["model"]), request, inputs)
    plan.mask_model(trained.model)
    after = _compute_validation_loss(trained, data)
    shares = {"channel_importance": plan.channel_importance, "block_importance": plan.layer_importance}
    found = f"{len(plan.channels[0])} of {plan.num_channels} channels, {plan.channel_importance:.1%} of the importance"
    found += f"; {len(plan.layers)} of {plan.num_layers} blocks, {plan.layer_importance:.1%}: {list(plan.layers)}"
    loss = f"validation loss {before:.4f} before, {after:.4f} after: {after / before - 1:+.1%}"
    losses = {"before": before, "after": after}
    return plan, [ProofCheck("kept", True, found, shares), ProofCheck("pruning", True, loss, losses)]


def _compute_validation_loss(trained: TrainedModel, data: RunData) -> float:
    dist_env = dist_env_from_environment({}, "cpu")
    return score_model(trained, LanguageModeling(), data, dist_env, trained.recipe.evaluation.max_samples).loss


def prove_export(reference: Reference, directory: Path, form: QuantizedForm | None, dtype: str) -> list[ProofCheck]:
    """Reload an export, and the GGUF file in it if llama-cpp-python is installed, and compare it with its checkpoint.
    `dtype`: that of most of its weights."""
    is_huggingface = huggingface_location(reference.build) is not None
    prompts, num_tokens = list[list[int]](), reference.inputs.shape[1]
    if is_huggingface and reference.has_loss and reference.images is None and not reference.vision:
        prompts = reference.inputs[:NUM_PROMPTS, : min(MAX_PROMPT_TOKENS, (num_tokens + 1) // 2)].tolist()
    max_new_tokens = min(MAX_NEW_TOKENS, num_tokens - len(prompts[0])) if prompts else 0
    with tempfile.TemporaryDirectory(prefix="phalanx-export-") as scratch:
        request = ReloadRequest(str(directory), scratch, reference.build, prompts, max_new_tokens, reference.text)
        function = reload.reload_with_transformers if is_huggingface else reload.reload_with_builder
        reply, scores = _reload(request, reference, function)
        checks_of_gguf = list[ProofCheck]()
        if (directory / GGUF_FILE).is_file() and find_spec("llama_cpp") is not None:
            checks_of_gguf += _prove_gguf(request, reference, dtype)
    checks = [*reference.pruning_checks, *reply.checks]
    if scores is not None:
        checks += _check_scores(reference, scores, form, dtype, DTYPE_TOLERANCES[dtype])
    if scores is not None and is_huggingface and all(check.passed for check in checks if check.name == "load"):
        checks += _compare_with_own_reader(reference, request, form, reply, scores)
    return checks + checks_of_gguf


def _prove_gguf(request: ReloadRequest, reference: Reference, dtype: str) -> Iterator[ProofCheck]:
    """Compare the GGUF file of an export with the checkpoint, and its generation with our own reader's."""
    of_file = replace(request, directory=str(Path(request.directory, GGUF_FILE)))
    reply, scores = _reload(of_file, reference, reload_with_llama_cpp)
    checks, tolerance = list(reply.checks), max(LLAMA_CPP_TOLERANCE, DTYPE_TOLERANCES[dtype])
    if scores is not None:
        checks += _check_scores(reference, scores, None, dtype, tolerance)
    if reply.generated:
        continued = list(zip(request.prompts, reply.generated, strict=True))
        model = load_export(Path(request.directory), None)
        checks.append(check_generation(model, continued, set(reply.end_tokens), tolerance))
    return (replace(check, name=f"gguf {check.name}") for check in checks)


def _describe_text(run: Run, inputs: Tensor) -> TextFacts:
    """Return what the run says about texts, of which one is that of the first sample."""
    described = run.read_json_or_empty(run.plan).get("tokenizer")
    tokenizer = load_run_tokenizer(run.tokenizer, described, run.companions)
    texts = [PROBE_TEXT, tokenizer.decode(inputs[0].tolist())]
    encoded = [tokenizer.encode_prompt(text) for text in texts]
    separator = [] if tokenizer.separator_token is None else [tokenizer.separator_token]
    described = described if isinstance(described, Mapping) else {}
    ends = list(described.get("stops") or separator)
    ends += [described["end_of_turn"]] if "end_of_turn" in described else []
    configs = (run.read_json_or_empty(run.companions / name) for name in (TOKENIZER_CONFIG_FILE, "chat_template.json"))
    template: Any = next((config["chat_template"] for config in configs if config.get("chat_template")), None)
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    if (file := run.companions / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    return TextFacts(texts, encoded, list(tokenizer.begin_tokens), separator, ends, template)


def _reload(
    request: ReloadRequest, reference: Reference, function: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[ReloadReply, Tensor | None]:
    """Have a request answered in a process of its own; without scores if the export cannot be loaded."""
    tensors = {"inputs": reference.inputs, **reference.vision}
    tensors |= {} if reference.images is None else {"images": reference.images}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, Path(request.scratch, reload.INPUTS_FILE))
    process, file = CallProcess(), Path(request.scratch, reload.SCORES_FILE)
    file.unlink(missing_ok=True)
    try:
        process.send_call(f"{function.__module__}:{function.__name__}", asdict(request))
        while (messages := process.receive()) is not None:
            for reply in (each for each in messages if isinstance(each, CallReturned | CallRaised)):
                answer = TypeAdapter(ReloadReply).validate_python(value_of(reply))
                return answer, load_file(file)["scores"] if file.is_file() else None
    finally:
        process.kill()
    raise DataError("the process that reloads the export was killed, as where memory runs out; use --no-verify")


def _make_check(name: str, passed: bool, found: str, **figures: float) -> ProofCheck:
    return ProofCheck(name, passed, found, {key: value for key, value in figures.items() if math.isfinite(value)})


def _check_scores(
    reference: Reference, scores: Tensor, form: QuantizedForm | None, dtype: str, tolerance: float
) -> Iterator[ProofCheck]:
    """Compare with the checkpoint's model: what rounding or quantizing the weights changes."""
    difference = scores - reference.scores
    relative = float(difference.square().mean().sqrt() / reference.scores.square().mean().sqrt())
    largest = float(difference.abs().max())
    passed = relative <= tolerance if form is None else math.isfinite(relative)
    by_loss = "judged by the loss" if reference.has_loss else "not judged: there is no loss"
    judged = f"tolerance of {dtype} {tolerance:g}" if form is None else by_loss
    found = f"max |difference| {largest:.3g}, relative (RMS) {relative:.2g}, {judged}"
    yield _make_check("logits", passed, found, max_difference=largest, relative_difference=relative)
    if reference.has_loss:
        measure, targets = nn.CrossEntropyLoss(ignore_index=IGNORE_INDEX), reference.targets.flatten()
        before, after = (float(measure(each.flatten(0, -2), targets)) for each in (reference.scores, scores))
        change, limit = (after - before) / before, tolerance if form is None else form.max_loss_increase
        sign, passed = ("±", abs(change) <= limit) if form is None else ("+", change <= limit)
        found = f"{before:.5f} before, {after:.5f} after: {change:+.3%}, limit {sign}{limit:.2%}"
        yield _make_check("loss", passed, found, before=before, after=after, relative_change=change, limit=limit)


def _compare_with_own_reader(
    reference: Reference, request: ReloadRequest, form: QuantizedForm | None, reply: ReloadReply, scores: Tensor
) -> Iterator[ProofCheck]:
    """Compare with our own model of the same files: what transformers reads is what was meant."""
    model = load_export(Path(request.directory), form)
    own, _ = compute_scores(model, reference.inputs, reference.vision)
    rounds_inputs = form is not None and form.round_inputs is not None
    tolerance = ROUNDED_INPUTS_TOLERANCE if rounds_inputs else SAME_WEIGHTS_TOLERANCE
    largest = float((scores - own).abs().max() / own.abs().max())
    found = f"largest difference from our own reader {largest:.2g} of the largest score, tolerance {tolerance:g}"
    yield _make_check("same weights", largest <= tolerance, found, difference=largest, tolerance=tolerance)
    if reply.generated:
        ends = set(reply.end_tokens if reference.text is None else reference.text.ends)
        yield check_generation(model, list(zip(request.prompts, reply.generated, strict=True)), ends, tolerance)


def check_generation(
    model: nn.Module, continued: list[tuple[list[int], list[int]]], ends: set[int], tolerance: float
) -> ProofCheck:
    """Compare what continues each prompt token by token: each must be the one that our own greedy generation takes
    after the same tokens. Where two are as likely within the tolerance, either may be."""
    for number, (prompt, tokens) in enumerate(continued, 1):
        scores, _ = compute_scores(model, torch.tensor([prompt + tokens]))
        rows = scores[0, len(prompt) - 1 : -1]
        lacking = rows.amax(-1) - rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        wrong = (lacking > tolerance * rows.abs().amax(-1)).nonzero().flatten().tolist()
        if wrong:
            found = f"token {wrong[0] + 1} is {tokens[wrong[0]]}, ours is {int(rows[wrong[0]].argmax())}"
        elif not ends.isdisjoint(tokens[:-1]):
            found = f"continues behind token {min(ends.intersection(tokens[:-1]))}, which ends the run's texts"
        else:
            continue
        return ProofCheck("generation", False, f"prompt {number}: {found}")
    num_tokens = sum(len(tokens) for _, tokens in continued)
    num_ended = sum(tokens[-1] in ends for _, tokens in continued)
    found = f"{num_tokens} of {num_tokens} tokens of {len(continued)} prompts are ours; {num_ended} reached their end"
    return _make_check("generation", True, found, num_tokens=num_tokens, num_ended=num_ended)
