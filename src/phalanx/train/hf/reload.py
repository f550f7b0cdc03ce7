"""Reload an export from its directory alone, in a process of its own: with transformers for a model that came from a
Hugging Face directory, else with its builder; and a GGUF file with llama.cpp. What its files say is compared with the
run here (of GGUF with the tokenizer from which it was converted); what it computes, on the CPU in fp32, is written for
the caller.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.data.chat_images import ImageProcessor, read_processor_files, select_image_inputs, unpack_files
from phalanx.recipe.imports import HF_CONFIG_FILE, describe_exception, import_object
from phalanx.run.companions import GENERATION_CONFIG_FILE, TOKENIZER_FILE
from phalanx.train.hf.config import get_text_config, import_transformers
from phalanx.train.hf.inputs import find_logits
from phalanx.train.hf.safetensors_reader import find_tied_names, open_weight_reader

INPUTS_FILE, SCORES_FILE = "inputs.safetensors", "scores.safetensors"
"""`inputs` (tokens [n, s] or pixel values [n, c, h, w]), with these `images` (uint8 [n, h, w, c]); and `scores`. Of a
vision-language model also its image inputs, by the names of a batch, and the packed `files` that they come from."""
AUTO_CLASSES = {"CausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM"}
AUTO_CLASSES |= {"ForSequenceClassification": "AutoModelForSequenceClassification"}
AUTO_CLASSES |= {"ForImageClassification": "AutoModelForImageClassification"}
"""Classes with which users load architectures, by how the names of these end."""
IMAGE_TEXT_CLASS = "AutoModelForImageTextToText"
GREETING_DIALOGUE = [{"role": "user", "content": "Hello"}]
SPECIAL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
PIXEL_TOLERANCE = 1e-4


@dataclass(frozen=True)
class ProofCheck:
    """A comparison of an export with its run: what was found, and the finite figures of it."""

    name: str
    passed: bool
    found: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TextFacts:
    """What a run says about texts: the tokens of some, what begins and ends one, the tokens at which generation stops,
    and the chat template, one or several by name."""

    texts: list[str]
    encoded: list[list[int]]
    begin: list[int]
    separator: list[int]
    ends: list[int]
    chat_template: str | dict[str, str] | None


@dataclass(frozen=True)
class ReloadRequest:
    """What to compare and compute with the export at `directory` of the model that a recipe names by `build`; in
    `scratch` are INPUTS_FILE and SCORES_FILE."""

    directory: str
    scratch: str
    build: str
    prompts: list[list[int]]
    max_new_tokens: int
    text: TextFacts | None


@dataclass
class ReloadReply:
    """The checks that were made, the tokens that continue each prompt, and those at which generation ends."""

    checks: list[ProofCheck] = field(default_factory=list)
    generated: list[list[int]] = field(default_factory=list)
    end_tokens: list[int] = field(default_factory=list)


def reload_with_transformers(payload: dict[str, Any]) -> dict[str, Any]:
    """Answer a ReloadRequest with transformers by a ReloadReply, both as mappings."""
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    request, reply = TypeAdapter(ReloadRequest).validate_python(payload), ReloadReply()
    directory, tensors = Path(request.directory), load_file(Path(request.scratch, INPUTS_FILE))

    def load(loader: Any, **options: Any) -> Any:
        return loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **options)

    def check_model() -> Iterator[ProofCheck]:
        architecture = load(transformers.AutoConfig).architectures[0]
        names = (name for ending, name in AUTO_CLASSES.items() if architecture.endswith(ending))
        loader = getattr(transformers, IMAGE_TEXT_CLASS if "files" in tensors else next(names, architecture))
        model, info = load(loader, dtype=torch.float32, output_loading_info=True)
        kind = f"{architecture} by {loader.__name__}, transformers {transformers.__version__}"
        yield _check_names(kind, {str(name) for names in info.values() for name in names})
        scores, _ = compute_scores(model.eval(), tensors["inputs"], tensors)
        save_file({"scores": scores}, Path(request.scratch, SCORES_FILE))
        if request.prompts and model.can_generate():
            reply.end_tokens = ends = _as_list(model.generation_config.eos_token_id)
            if request.text is not None and (own := set(request.text.ends)):
                found = f"generation ends at {ends}, the run's at {sorted(own)}"
                yield ProofCheck("end of text", own <= set(ends) <= own.union(request.text.separator), found)
            reply.generated = _generate(transformers, model, request, ends)

    def check_special_tokens() -> Iterator[ProofCheck]:
        config = get_text_config(load(transformers.AutoConfig))
        loaders = {GENERATION_CONFIG_FILE: transformers.GenerationConfig, TOKENIZER_FILE: transformers.AutoTokenizer}
        owners = [config, *(load(loader) for file, loader in loaders.items() if (directory / file).is_file())]
        tokens = {token for owner in owners for key in SPECIAL_KEYS for token in _as_list(getattr(owner, key, None))}
        if (vocab_size := getattr(config, "vocab_size", None)) is not None:
            found = f"begin, end and padding are {sorted(tokens)}, the vocabulary has {vocab_size:,}"
            yield ProofCheck("special tokens", all(0 <= token < vocab_size for token in tokens), found)

    def check_image_processor() -> Iterator[ProofCheck]:
        images, processor = [image.numpy() for image in tensors["images"]], load(transformers.AutoImageProcessor)
        pixels = processor(images, return_tensors="pt", input_data_format="channels_last").pixel_values
        largest = float((pixels - tensors["inputs"]).abs().max())
        found = f"largest difference from the inputs of training {largest:.2g}, tolerance {PIXEL_TOLERANCE:g}"
        yield ProofCheck("image processor", largest <= PIXEL_TOLERANCE, found)

    def check_processor() -> Iterator[ProofCheck]:
        files = unpack_files(np.frombuffer(tensors["files"].numpy().tobytes(), np.uint32))
        processor = ImageProcessor(read_processor_files(directory), directory / TOKENIZER_FILE)
        inputs = processor.make_inputs([files], tensors["inputs"].numpy())
        same = all(name in inputs and np.array_equal(inputs[name], x) for name, x in tensors.items() if ":" in name)
        found = f"what it makes of the images of a sample is {'' if same else 'not '}that of training"
        yield ProofCheck("processor", same, found)

    parts: dict[str, Callable[[], Iterator[ProofCheck]]] = {"load": check_model, "special tokens": check_special_tokens}
    if (text := request.text) is not None:
        parts["tokenizer"] = lambda: compare_text(text, load(transformers.AutoTokenizer))
    if "images" in tensors:
        parts["image processor"] = check_image_processor
    if "files" in tensors:
        parts["processor"] = check_processor
    for name, check in parts.items():
        try:
            with redirect_stderr(io.StringIO()):  # the progress bars of libraries
                reply.checks.extend(check())  # those before an exception, too
        except Exception as error:  # noqa: BLE001 - transformers may raise anything for wrong files
            reply.checks.append(ProofCheck(name, False, describe_exception(error)))
    return asdict(reply)


def reload_with_builder(payload: dict[str, Any]) -> dict[str, Any]:
    """Answer a ReloadRequest with the model's builder by a ReloadReply, both as mappings."""
    request = TypeAdapter(ReloadRequest).validate_python(payload)
    spec = json.loads(Path(request.directory, HF_CONFIG_FILE).read_text(encoding="utf-8"))
    model: nn.Module = import_object(request.build, key="model.build")(**spec["args"])
    reader = open_weight_reader(Path(request.directory))
    keys = model.load_state_dict({name: reader.read(name) for name in reader.files}, strict=False)
    unmatched = {*keys.missing_keys, *keys.unexpected_keys} - find_tied_names(model).keys()
    scores, _ = compute_scores(model.eval(), load_file(Path(request.scratch, INPUTS_FILE))["inputs"])
    save_file({"scores": scores}, Path(request.scratch, SCORES_FILE))
    return asdict(ReloadReply([_check_names(request.build, unmatched)]))


def compute_scores(model: nn.Module, inputs: Tensor, vision: Mapping[str, Tensor] | None = None) -> tuple[Tensor, bool]:
    """Return the logits of inputs [n, ...] in fp32, or the hidden states of a model without an output layer, and
    whether they are logits. One sample is computed at a time; `vision` has the images of the only one."""
    rows, has_logits = [], True
    with torch.no_grad():
        for sample in inputs:
            output = model(sample[None], **select_image_inputs(vision or {}))
            logits = find_logits(output)
            has_logits = logits is not None
            rows.append((output[0] if logits is None else logits).float())
    return torch.cat(rows).contiguous(), has_logits


def _check_names(kind: str, unmatched: set[str]) -> ProofCheck:
    found = f"missing or left: {', '.join(sorted(unmatched)[:5])}" if unmatched else "no tensor is missing or left"
    return ProofCheck("load", not unmatched, f"{kind}; {found}")


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _generate(transformers: Any, model: Any, request: ReloadRequest, ends: list[int]) -> list[list[int]]:
    """Continue each prompt by the most likely tokens alone, whatever else generation_config.json asks for."""
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=request.max_new_tokens, eos_token_id=ends or None, pad_token_id=(*ends, 0)[0]
    )
    with torch.no_grad():
        prompts = [torch.tensor([prompt]) for prompt in request.prompts]
        outputs = [model.generate(tokens, attention_mask=torch.ones_like(tokens)) for tokens in prompts]
    return [output[0, len(prompt) :].tolist() for prompt, output in zip(request.prompts, outputs, strict=True)]


def compare_text(text: TextFacts, tokenizer: Any) -> Iterator[ProofCheck]:
    """Compare tokens, the begin of a text, which must be there once, and the chat template."""
    pairs = [(ours, tokenizer(each)["input_ids"]) for each, ours in zip(text.texts, text.encoded, strict=True)]
    others = [(ours[:12], theirs[:12]) for ours, theirs in pairs if theirs not in (ours, ours + text.separator)]
    found = f"{sum(map(len, text.encoded))} tokens of {len(pairs)} texts are the run's"
    if others:
        found = f"a text begins with {others[0][1]}, the run's with {others[0][0]}"
    yield ProofCheck("tokenizer", not others, found)
    template = tokenizer.chat_template
    if text.chat_template or template:
        found = "is the run's" if template == text.chat_template else "is not the run's" if template else "is missing"
        yield ProofCheck("chat template", template == text.chat_template, found)
    if text.begin:
        first = text.begin[0]
        dialogue = tokenizer.apply_chat_template(GREETING_DIALOGUE, return_dict=False) if template else []
        once = all(tokens[:1] == [first] != tokens[1:2] for _, tokens in pairs) and dialogue.count(first) <= 1
        found = f"token {first} begins a text {'once' if once else 'not at all, or several times'}"
        yield ProofCheck("begin of text", once, found)


TEMPLATE_KEY = "tokenizer.chat_template"
_GGML_TYPE_F32 = 0


def reload_with_llama_cpp(payload: dict[str, Any]) -> dict[str, Any]:
    """Answer a ReloadRequest, of which `directory` is the GGUF file, next to what it was converted from, by a
    ReloadReply, both as mappings."""
    request, reply = TypeAdapter(ReloadRequest).validate_python(payload), ReloadReply()
    try:
        reply.checks.extend(_check_gguf_file(request, reply))  # those before an exception, too
    except Exception as error:  # noqa: BLE001 - llama.cpp may raise anything for wrong files
        reply.checks.append(ProofCheck("load", False, describe_exception(error)))
    return asdict(reply)


def _check_gguf_file(request: ReloadRequest, reply: ReloadReply) -> Iterator[ProofCheck]:
    import llama_cpp

    file, tokens = Path(request.directory), load_file(Path(request.scratch, INPUTS_FILE))["inputs"]
    length = max(tokens.shape[1], max(map(len, request.prompts), default=0) + request.max_new_tokens)
    options = {"n_ctx": length, "n_batch": length, "n_ubatch": length, "n_gpu_layers": 0, "n_threads": 1}
    cache_types = {"type_k": _GGML_TYPE_F32, "type_v": _GGML_TYPE_F32}
    model = llama_cpp.Llama(str(file), logits_all=True, verbose=False, n_threads_batch=1, **options, **cache_types)
    architecture = model.metadata.get("general.architecture")
    yield ProofCheck("load", True, f"{architecture} by llama-cpp-python {llama_cpp.__version__}")
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
    yield from _compare_gguf_text(model, tokenizer, request)
    rows = []
    for sample in tokens.tolist():
        model.reset()
        model.eval(sample)
        rows.append(torch.from_numpy(model.scores[: len(sample)].copy()))
    save_file({"scores": torch.stack(rows)}, Path(request.scratch, SCORES_FILE))
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    ends = [token for token in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token)]
    own, reply.end_tokens = set([] if request.text is None else request.text.ends), ends
    yield ProofCheck("end of text", own <= set(ends), f"generation ends at {ends}, the run's at {sorted(own)}")
    for prompt in request.prompts:
        generated = list[int]()
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            generated.append(token)
            if token in ends or len(generated) == request.max_new_tokens:
                break
        reply.generated.append(generated)


def _compare_gguf_text(model: Any, tokenizer: Any, request: ReloadRequest) -> Iterator[ProofCheck]:
    """Compare the tokens of texts, of one with all control tokens and of a dialogue, and the chat template."""
    texts = [] if request.text is None else list(request.text.texts)
    texts.append(f"a {' b'.join(tokenizer.all_special_tokens)}\nc")
    template = tokenizer.chat_template
    if template:
        texts.append(tokenizer.apply_chat_template(GREETING_DIALOGUE, tokenize=False))
    pairs = [(tokenizer(text)["input_ids"], model.tokenize(text.encode(), special=True)) for text in texts]
    others = [(ours[:12], theirs[:12]) for ours, theirs in pairs if ours != theirs]
    found = f"{sum(len(ours) for ours, _ in pairs)} tokens of {len(texts)} texts are the tokenizer's"
    if others:
        found = f"a text begins with {others[0][1]}, that of the tokenizer with {others[0][0]}"
    yield ProofCheck("tokenizer", not others, found)
    is_same = model.metadata.get(TEMPLATE_KEY) == template
    yield ProofCheck("chat template", is_same, "is the tokenizer's" if is_same else "is not the tokenizer's")
