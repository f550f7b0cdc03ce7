"""From a directory that transformers wrote, through our model and checkpoint, to one that transformers reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.data.tokenizers import train_bpe_tokenizer
from phalanx.errors import DataError
from phalanx.recipe.schema import AdapterConfig, ModelConfig
from phalanx.run import Run
from phalanx.run.companions import keep_companions
from phalanx.train.adapters.lora import adapter_scale, add_adapters, merge_adapters
from phalanx.train.adapters.targets import is_adapter_name
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.model_builder import build_model, describe_model

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

FACTS = DataInfo("tokens", tiny.VOCAB, None, 32, None)


def load(directory: Path, **args: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Our model of a directory, and what a checkpoint says of it."""
    spec = ModelConfig(build=f"hf:{directory.name}", args=args)
    model = build_model(spec, FACTS, directory.parent, 0, torch.device("cpu"))
    return model.eval(), {"model": describe_model(spec, FACTS, directory.parent)}


def originate(folder: Path, kind: str = "llama") -> tuple[nn.Module, dict[str, Any]]:
    """The same of a model of a kind, which transformers saves to a directory before."""
    tiny.save_random_model(folder / "origin", kind)
    return load(folder / "origin")


def run_with_tokenizer(folder: Path) -> Run:
    """The run of the exports here, with a tokenizer of its own."""
    run = Run(folder / "run")
    run.create()
    train_bpe_tokenizer(iter(["to be or not to be"] * 9), 270, run.tokenizer)
    return run


def export(folder: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any], **options: int) -> Path:
    return export_huggingface(save(folder / "run" / "checkpoints", 1, tensors, meta), folder / "out", **options)


def read_back(out: Path) -> nn.Module:
    """What transformers makes of an export, without a word."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    return model.eval()


def test_names_without_the_prefix_of_the_base_come_back(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path / "origin", "gpt2")
    file = tmp_path / "origin" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file, metadata={"format": "pt"})
    model, meta = load(tmp_path / "origin")
    out = export(tmp_path, get_model_tensors(model), meta, file_bytes=10_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == bare.keys()
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in read_back(out).named_parameters())


def test_tokenizer_files_come_along_and_weights_of_the_origin_do_not(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path / "origin", "llama")
    for name in ("special_tokens_map.json", "pytorch_model.bin", "modeling_own.py"):
        (tmp_path / "origin" / name).write_text("{}")
    model, meta = load(tmp_path / "origin")
    run = run_with_tokenizer(tmp_path)
    keep_companions(run, tmp_path / "origin")
    run.plan.write_text('{"tokenizer": {"name": "tokenizer.json", "separator": 0, "of_model": true}}')
    shutil.rmtree(tmp_path / "origin")
    out = export(tmp_path, get_model_tensors(model), meta)
    beside = {"config.json", "generation_config.json", "tokenizer.json", "special_tokens_map.json", "model.safetensors"}
    assert {file.name for file in out.iterdir()} == beside
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2  # the model's own


def test_the_config_has_the_changed_values_and_the_number_format_of_the_weights(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path / "origin", "llama").to(torch.bfloat16).save_pretrained(tmp_path / "origin")
    model, meta = load(tmp_path / "origin", attention_dropout=0.25)
    again = read_back(export(tmp_path, get_model_tensors(model), meta))
    assert again.config.attention_dropout == 0.25
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_adapters_are_folded_in(tmp_path: Path, kind: str) -> None:
    model, meta = originate(tmp_path, kind)
    spec = AdapterConfig(rank=4, alpha=8)
    adapt(model, meta, spec)
    # so small that each weight is in a file of its own, and its adapter has to be found beside it
    out = export(tmp_path, get_model_tensors(model), meta, file_bytes=100)
    again, merged = read_back(out).state_dict(), merge_adapters(dict(model.state_dict()), adapter_scale(spec))
    assert again.keys() == merged.keys()
    assert all(torch.equal(again[name], merged[name]) for name in merged)
    with torch.no_grad():
        tokens = tiny.random_tokens()
        torch.testing.assert_close(read_back(out)(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def adapt(model: nn.Module, meta: dict[str, Any], spec: AdapterConfig) -> None:
    """Add an adapter that does something, and to what a checkpoint says."""
    add_adapters(model, spec)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_name(name):
                parameter.normal_(std=0.2)
    meta["recipe"] = {"adapter": spec.model_dump()}


@pytest.mark.parametrize("remembers", [True, False], ids=["", "a checkpoint of before"])
@pytest.mark.parametrize("kind", ["llama-tied", "gpt2"])
def test_a_tied_head_that_has_an_adapter_is_untied(tmp_path: Path, kind: str, remembers: bool) -> None:
    model, meta = originate(tmp_path, kind)
    adapt(model, meta, AdapterConfig(rank=4, alpha=8, target_modules="lm_head"))
    if not remembers:
        del meta["model"]["huggingface"]["tied"]
    again = read_back(export(tmp_path, get_model_tensors(model), meta, file_bytes=100))
    assert again.config.tie_word_embeddings is False
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    with torch.no_grad():
        tokens = tiny.random_tokens()
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_conversion_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    model, meta = originate(tmp_path)
    meta["model"]["huggingface"]["converted"] = [{"tensors": ["experts"], "held": ["expert.0", "expert.1"]}]
    with pytest.raises(DataError, match="says that experts was made of other tensors"):
        export(tmp_path, get_model_tensors(model), meta)


def test_an_adapter_whose_weight_is_not_there_is_refused(tmp_path: Path) -> None:
    tensors = {"embedding.weight": torch.ones(8, 4), "head.lora_a": torch.ones(2, 4), "head.lora_b": torch.ones(8, 2)}
    meta = {"recipe": {"adapter": AdapterConfig(rank=2).model_dump()}, "model": {"build": "m:f", "args": {}}}
    with pytest.raises(DataError, match=r"there are adapters at head.weight, which is tied"):
        export(tmp_path, tensors, meta)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrapped", ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "a._orig_mod.{}"])
def test_names_are_those_of_the_model_and_not_of_what_wraps_it(tmp_path: Path, wrapped: str) -> None:
    tensors = {wrapped.format(name): torch.full((2,), float(i)) for i, name in enumerate(("a.weight", "b.module.bias"))}
    written = load_file(export(tmp_path, tensors, {}) / "model.safetensors")
    inner = "a." if wrapped.startswith("a.") else ""
    assert written.keys() == {f"{inner}a.weight", f"{inner}b.module.bias"}


# --- what goes along --------------------------------------------------------------------------------------------------


def said(folder: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> tuple[Path, str]:
    notes: list[str] = []
    out = export_huggingface(save(folder / "run" / "checkpoints", 1, tensors, meta), folder / "out", notes=notes.append)
    return out, "\n".join(notes)


def test_a_tokenizer_of_the_runs_own_takes_the_place_of_the_origins(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path / "origin", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
        (tmp_path / "origin" / name).write_text("{}")
    model, meta = load(tmp_path / "origin")
    run = run_with_tokenizer(tmp_path)
    out, notes = said(tmp_path, get_model_tensors(model), meta)
    assert (out / "tokenizer.json").read_bytes() == run.tokenizer.read_bytes()
    assert not (out / "vocab.json").exists()
    assert notes.splitlines()[0] == f"tokenizer.json copied from {tmp_path / 'run'}"
    read = transformers.AutoTokenizer.from_pretrained(out)
    assert read.eos_token_id == json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    assert read.decode(read("to be")["input_ids"]) == "to be"


def test_no_directory_that_a_manifest_names_is_read(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path / "origin", "llama")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "tokenizer.json").write_text('{"a": "secret"}')
    (tmp_path / "private" / "vocab.txt").write_text("secret")
    model, meta = load(tmp_path / "origin")
    meta["model"]["huggingface"]["directory"] = str(tmp_path / "private")
    meta["recipe"] = {"model": {"build": f"hf:{tmp_path / 'private'}"}}  # the manifest names it twice
    out, _ = said(tmp_path, get_model_tensors(model), meta)
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors"}


def test_config_json_names_what_begins_and_ends_a_text_of_another_tokenizer(tmp_path: Path) -> None:
    model, meta = originate(tmp_path)
    run = run_with_tokenizer(tmp_path)
    described = {"name": "tokenizer.json", "separator": 0, "begin": [65], "of_model": False}
    run.plan.write_text(json.dumps({"tokenizer": described}))
    out, _ = said(tmp_path, get_model_tensors(model), meta)
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (65, 0)
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_no_link_is_followed_out_of_the_directory_or_the_run(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path / "origin", "llama")
    (tmp_path / "secret").write_text("root:*:20228")
    (tmp_path / "origin" / "vocab.txt").symlink_to(tmp_path / "secret")
    model, meta = load(tmp_path / "origin")
    run, kept = Run(tmp_path / "run"), list[str]()
    run.create()
    keep_companions(run, tmp_path / "origin", kept.append)
    assert "a link that leads out of" in kept[0]
    for file in (run.companions / "vocab.txt", run.tokenizer):
        file.symlink_to(tmp_path / "secret")
    out, notes = said(tmp_path, get_model_tensors(model), meta)
    assert not any("root" in file.read_text(errors="replace") for file in out.iterdir())
    assert notes.count("a link that leads out of") == 2


def test_links_within_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    tiny.save_random_model(snapshot, "llama")
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "1").write_text("{}")
    (snapshot / "vocab.json").symlink_to("../../blobs/1")
    run = Run(tmp_path / "run")
    run.create()
    keep_companions(run, snapshot)
    assert (run.companions / "vocab.json").read_text() == "{}"


def save_half(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """A directory of a kind in half precision."""
    tiny.save_random_model(folder, kind).to(dtype).save_pretrained(folder, **options)


def dtypes_of(folder: Path) -> dict[str, torch.dtype]:
    return {name: t.dtype for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def declared_dtype(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["dtype"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=2)], ids=["whole", "adapters"])
def test_what_came_in_half_precision_leaves_in_it(
    tmp_path: Path, dtype: torch.dtype, adapter: AdapterConfig | None
) -> None:
    save_half(tmp_path / "origin", dtype=dtype)
    model, meta = load(tmp_path / "origin")
    if adapter is not None:
        add_adapters(model, adapter, torch.Generator().manual_seed(0))
        meta["recipe"] = {"adapter": adapter.model_dump()}
    out = export(tmp_path, get_model_tensors(model), meta)
    assert dtypes_of(out) == dtypes_of(tmp_path / "origin")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "origin", out)]
    assert sizes[1] <= 1.1 * sizes[0]
    assert declared_dtype(out) == declared_dtype(tmp_path / "origin") == str(dtype).removeprefix("torch.")


def test_an_adapter_is_merged_in_fp32_and_the_sum_rounded_once(tmp_path: Path) -> None:
    save_half(tmp_path / "origin")
    model, meta = load(tmp_path / "origin")
    config = AdapterConfig(rank=2)
    adapt(model, meta, config)
    out = export(tmp_path, get_model_tensors(model), meta)
    merged = merge_adapters(get_model_tensors(model), adapter_scale(config))
    assert all(torch.equal(t, merged[name].bfloat16()) for name, t in load_file(out / "model.safetensors").items())


def test_the_dtype_of_an_export_can_be_chosen(tmp_path: Path) -> None:
    save_half(tmp_path / "origin")
    model, meta = load(tmp_path / "origin")
    checkpoint = save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(model), meta)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        out = export_huggingface(checkpoint, tmp_path / name, dtype=name)
        assert set(dtypes_of(out).values()) == {dtype}
        assert declared_dtype(out) == str(dtype).removeprefix("torch.")


def test_a_weight_that_fp16_cannot_hold_is_named(tmp_path: Path) -> None:
    model, meta = originate(tmp_path)
    with torch.no_grad():
        model.get_parameter("lm_head.weight")[0, 0] = 1e5
    checkpoint = save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(model), meta)
    with pytest.raises(DataError, match=r"lm_head.weight: has values that fp16 cannot hold .*; use --dtype bf16"):
        export_huggingface(checkpoint, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_tensors_that_came_in_another_dtype_than_most_keep_it(tmp_path: Path) -> None:
    save_half(tmp_path / "origin")
    file = tmp_path / "origin" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].float()}, file, metadata={"format": "pt"})
    model, meta = load(tmp_path / "origin")
    out = export(tmp_path, get_model_tensors(model), meta)
    assert dtypes_of(out) == dtypes_of(tmp_path / "origin")


def test_a_model_keeps_in_fp32_what_it_declares_so_whatever_dtype_is_chosen(tmp_path: Path) -> None:
    origin = tiny.build_random_model("deepseek-v3")
    origin.save_pretrained(tmp_path / "origin")
    model, meta = load(tmp_path / "origin")
    checkpoint = save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(model), meta)
    dtypes = dtypes_of(export_huggingface(checkpoint, tmp_path / "out", dtype="bf16"))
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if name.endswith(("e_score_correction_bias", ".gate.weight"))} != set()


def test_files_are_at_most_as_large_as_those_of_the_original(tmp_path: Path) -> None:
    save_half(tmp_path / "origin", max_shard_size="20KB")
    model, meta = load(tmp_path / "origin")
    out = export(tmp_path, get_model_tensors(model), meta)
    sizes = [sorted(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (tmp_path / "origin", out)]
    assert len(sizes[1]) > 1
    assert sizes[1][-1] <= 1.2 * sizes[0][-1]  # headers are a tenth of such small files
    read_back(out)


def test_an_own_tokenizer_keeps_the_generation_config_without_its_tokens(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "eos_token_id": [2, 3], "bos_token_id": 1, "suppress_tokens": [5]}
    model, meta = originate(tmp_path)
    companions = run_with_tokenizer(tmp_path).companions
    companions.mkdir(parents=True, exist_ok=True)
    (companions / "generation_config.json").write_text(json.dumps(values))
    out = export(tmp_path, get_model_tensors(model), meta)
    kept = json.loads((out / "generation_config.json").read_text())
    end = json.loads((out / "config.json").read_text()).get("eos_token_id")
    assert kept == {"temperature": 0.6, **({} if end is None else {"eos_token_id": end})}


def test_a_run_of_bytes_keeps_the_generation_config_without_its_tokens(tmp_path: Path) -> None:
    model, meta = originate(tmp_path)
    run = Run(tmp_path / "run")
    run.companions.mkdir(parents=True)
    (run.companions / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "suppress_tokens": [5]}))
    run.plan.write_text(json.dumps({"tokenizer": {"name": "bytes"}}))
    out = export(tmp_path, get_model_tensors(model), meta)
    kept = json.loads((out / "generation_config.json").read_text())
    assert kept.pop("eos_token_id") == json.loads((out / "config.json").read_text())["eos_token_id"]
    assert kept == {"temperature": 0.6}


def test_tensors_that_the_model_does_not_use_are_named(tmp_path: Path) -> None:
    tiny.build_random_model("deepseek-v3").save_pretrained(tmp_path / "origin")
    file = tmp_path / "origin" / "model.safetensors"
    extra = {"model.layers.61.embed_tokens.weight": torch.ones(2)}  # as files of DeepSeek-V3 have for a further layer
    save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    model, meta = load(tmp_path / "origin")
    _, notes = said(tmp_path, get_model_tensors(model), meta)
    assert "1 tensor of the original that the model does not use is not in the export (model.layers.61" in notes
