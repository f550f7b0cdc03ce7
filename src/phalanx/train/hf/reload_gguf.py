"""Reload an export in GGUF with llama.cpp, in a process of its own, on the CPU. Its tokens are compared with those of
the tokenizer from which it was converted; what it computes is written for the caller."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.recipe.imports import describe_exception
from phalanx.train.hf.config import import_transformers
from phalanx.train.hf.reload import GREETING, INPUTS_FILE, SCORES_FILE, ProofCheck, ReloadReply, ReloadRequest

TEMPLATE_KEY = "tokenizer.chat_template"
_GGML_TYPE_F32 = 0


def reload_with_llama_cpp(payload: dict[str, Any]) -> dict[str, Any]:
    """Answer a ReloadRequest, of which `directory` is the GGUF file, next to what it was converted from, by a
    ReloadReply, both as mappings."""
    request, reply = TypeAdapter(ReloadRequest).validate_python(payload), ReloadReply()
    try:
        reply.checks.extend(_check_file(request, reply))  # those before an exception, too
    except Exception as error:  # noqa: BLE001 - llama.cpp may raise anything for wrong files
        reply.checks.append(ProofCheck("load", False, describe_exception(error)))
    return asdict(reply)


def _check_file(request: ReloadRequest, reply: ReloadReply) -> Iterator[ProofCheck]:
    import llama_cpp

    file, tokens = Path(request.directory), load_file(Path(request.scratch, INPUTS_FILE))["inputs"]
    length = max(tokens.shape[1], max(map(len, request.prompts), default=0) + request.max_new_tokens)
    options = {"n_ctx": length, "n_batch": length, "n_ubatch": length, "n_gpu_layers": 0, "n_threads": 1}
    cache_types = {"type_k": _GGML_TYPE_F32, "type_v": _GGML_TYPE_F32}
    model = llama_cpp.Llama(str(file), logits_all=True, verbose=False, n_threads_batch=1, **options, **cache_types)
    architecture = model.metadata.get("general.architecture")
    yield ProofCheck("load", True, f"{architecture} by llama-cpp-python {llama_cpp.__version__}")
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
    yield from _compare_text(model, tokenizer, request)
    save_file({"scores": _compute_scores(model, tokens)}, Path(request.scratch, SCORES_FILE))
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


def _compare_text(model: Any, tokenizer: Any, request: ReloadRequest) -> Iterator[ProofCheck]:
    """Compare the tokens of texts, of one with all control tokens and of a dialogue, and the chat template."""
    texts = [] if request.text is None else list(request.text.texts)
    texts.append(f"a {' b'.join(tokenizer.all_special_tokens)}\nc")
    template = tokenizer.chat_template
    if template:
        texts.append(tokenizer.apply_chat_template(GREETING, tokenize=False))
    pairs = [(tokenizer(text)["input_ids"], model.tokenize(text.encode(), special=True)) for text in texts]
    others = [(ours[:12], theirs[:12]) for ours, theirs in pairs if ours != theirs]
    found = f"{sum(len(ours) for ours, _ in pairs)} tokens of {len(texts)} texts are the tokenizer's"
    if others:
        found = f"a text begins with {others[0][1]}, that of the tokenizer with {others[0][0]}"
    yield ProofCheck("tokenizer", not others, found)
    is_same = model.metadata.get(TEMPLATE_KEY) == template
    yield ProofCheck("chat template", is_same, "is the tokenizer's" if is_same else "is not the tokenizer's")


def _compute_scores(model: Any, tokens: Tensor) -> Tensor:
    """tokens [n, s] -> logits [n, s, vocabulary] in fp32."""
    rows = []
    for sample in tokens.tolist():
        model.reset()
        model.eval(sample)
        rows.append(torch.from_numpy(model.scores[: len(sample)].copy()))
    return torch.stack(rows)
