"""Exports of trained runs that prove themselves, and proofs that fail."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import train_harness
from chat_inputs import save_chat_model, write_chat_inputs
from phalanx.app import export, export_proof
from phalanx.app.export import find_license
from phalanx.cli import main
from phalanx.cli.checkpoint import app
from phalanx.data.tokenizers import train_bpe_tokenizer
from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.call_process import answer_call
from phalanx.run.process_messages import CallRaised, CallReturned, RunCall
from phalanx.train.checkpoint.compressed_tensors import INT4_FORM, Int4AwareLinear, load_export, round_weight
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.gguf import CONVERTER_VARIABLE
from phalanx.train.checkpoint.run_gguf_converter import LLAMA_CPP_NAMES, name_pre_tokenizer
from phalanx.train.inference import load_trained_model
from train_harness import HarnessRun, TrainHarness, Values

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

NO_PEER = find_spec("compressed_tensors") is None
NO_CONVERTER = not os.environ.get(CONVERTER_VARIABLE)
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|endoftext|>' }}{% endfor %}"


def train(lab: TrainHarness, kind: str, workers: int = 1, **changes: Any) -> Run:
    """A run of a tiny model that came in bf16 with a tokenizer, a chat template and a license."""
    origin = lab.folder / f"origin-{kind}"
    if not origin.exists():
        torch.manual_seed(0)
        sizes = {} if kind == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
        model = transformers.AutoModelForCausalLM.from_config(tiny.make_config(kind, vocab_size=300, **sizes))
        model.generation_config.eos_token_id = 0
        model.to(torch.bfloat16).save_pretrained(origin)
        train_bpe_tokenizer(iter([(lab.folder / "few.txt").read_text()]), 280, origin / "tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
        (origin / "tokenizer_config.json").write_text(json.dumps(config))
        (origin / "LICENSE").write_text("Apache License")
        (origin / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    recipe: Values = {
        "model": {"build": f"hf:{origin.name}"},
        "data": {"source": {"text": "few.txt"}, "tokenizer": origin.name, "seq_len": 32},
        "steps": 6,
        **changes,
    }
    return lab.train(recipe, workers).run


@pytest.fixture(scope="module")
def run(lab: TrainHarness) -> Iterator[Run]:
    """Fine-tuned with adapters, also on the output layer, which is tied to the embedding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_harness, "BASE_RECIPE", {**train_harness.BASE_RECIPE, "model": {}})
        yield train(lab, "llama-tied", adapter={"rank": 4, "target_modules": ["q_proj", "down_proj", "lm_head"]})


class SameProcess:
    """Answers calls in this process: starting one takes seconds."""

    def send_call(self, function: str, payload: Any) -> None:
        self.reply = answer_call(RunCall(function=function, payload=payload, call_id=0))

    def receive(self) -> list[CallReturned | CallRaised]:
        return [self.reply]

    def kill(self) -> None:
        pass


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_proof, "CallProcess", SameProcess)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)


def damage(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]) -> None:
    """Change an export after it was written."""
    prove = export.prove_export

    def prove_changed(reference: Any, directory: Path, *rest: Any) -> Any:
        change(directory)
        return prove(reference, directory, *rest)

    monkeypatch.setattr(export, "prove_export", prove_changed)


def edit_json(name: str, **values: Any) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return edit


def test_an_export_proves_itself_in_a_process_of_its_own_and_says_what_it_is(run: Run, tmp_path: Path) -> None:
    result = call(run.path, tmp_path / "out")
    assert result.exit_code == 0
    rows = [line.split()[:2] for line in result.output.splitlines()]
    named = ["load", "tokenizer", "logits", "loss", "generation", "files"]
    assert all([name, "PASS"] in rows for name in named)
    assert "FAIL" not in result.output
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    weights = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert record["files"]["model.safetensors"] == weights
    assert (record["base_model"], record["base_license"]) == ("origin-llama-tied", "apache-2.0")
    assert record["checkpoint_digest"] == (run.read_json(run.result) or {})["digest"]
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache License"
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: origin-llama-tied\nlicense: apache-2.0\n---\n")
    assert re.search(r"\| loss \| PASS \| \d", card)


@pytest.mark.usefixtures("in_this_process")
def test_an_export_stops_at_the_end_of_an_answer_that_its_base_did_not_know(
    lab: TrainHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chat_inputs(lab.folder)
    save_chat_model(lab.folder / "base", eos_token_id=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(lab.folder / "base")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(lab.folder / "base")
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    monkeypatch.setattr(train_harness, "BASE_RECIPE", {**train_harness.BASE_RECIPE, "model": {}, "data": {}})
    data = {"source": {"jsonl": "chat.jsonl"}, "tokenizer": "base", "seq_len": 64}
    changes: Values = {"model": {"build": "hf:base"}, "task": "chat", "data": data, "steps": 2}
    outcome = export.export_checkpoint(str(lab.train(changes).run.path), tmp_path / "out")
    assert all(check.passed for check in outcome.checks)
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == [0, end_of_turn]


@pytest.mark.usefixtures("in_this_process")
def test_merged_adapters_compute_what_adapters_do(run: Run, tmp_path: Path) -> None:
    outcome = export.export_checkpoint(str(run.path), tmp_path / "out", dtype="fp32")
    checks = {check.name: check for check in outcome.checks}
    assert all(check.passed for check in outcome.checks)
    assert checks["logits"].figures["max_difference"] < 1e-5
    assert checks["generation"].figures["num_tokens"] > 40
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("change", "failed", "found"),
    [
        (edit_weights(lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].mul_(-1)), "logits", "RMS"),
        (edit_weights(lambda tensors: tensors.pop("model.norm.weight")), "load", "missing or left: model.norm.weight"),
        (edit_json("generation_config.json", eos_token_id=7), "end of text", r"ends at \[7\], the run's at \[0\]"),
        (edit_json("generation_config.json", pad_token_id=999), "special tokens", "999.*the vocabulary has 300"),
        (edit_json("tokenizer_config.json", chat_template="{{ messages }}"), "chat template", "is not the run's"),
        (lambda out: (out / "generation_config.json").write_text("{"), "special tokens", "generation_config.json"),
        (lambda out: train_bpe_tokenizer(iter(["other"]), 260, out / "tokenizer.json"), "tokenizer", "begins with"),
    ],
)
def test_what_was_damaged_after_it_was_written_fails_and_is_kept(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], object],
    failed: str,
    found: str,
) -> None:
    damage(monkeypatch, change)
    outcome = export.export_checkpoint(str(run.path), tmp_path / "out")
    checks = {check.name: check for check in outcome.checks if not check.passed}
    assert re.search(found, checks[failed].found)
    assert "files" in checks
    assert outcome.directory == tmp_path / "out.failed"
    assert [path.name for path in tmp_path.iterdir()] == ["out.failed"]


@pytest.mark.usefixtures("in_this_process")
def test_a_failed_proof_ends_with_65_and_names_its_checks_and_where_the_files_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(monkeypatch, edit_json("generation_config.json", eos_token_id=7))
    assert main.main(["checkpoint", "export", str(run.path), str(tmp_path / "out"), "--json"]) == 65
    printed = capsys.readouterr()
    assert re.search(r"failed the proof: end of text, .*files; what was written is kept as .*out.failed", printed.err)
    facts = json.loads(printed.out)
    assert facts["out"] == str(tmp_path / "out.failed")
    assert {"end of text", "files"} <= {check["name"] for check in facts["checks"] if not check["passed"]}
    with pytest.raises(UsageError, match=r"out.failed: exists already, from an export that failed its proof"):
        call(run.path, tmp_path / "out")


@pytest.mark.skipif(NO_PEER, reason="compressed-tensors is not installed: quantized exports are not proved")
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_transformers_computes_with_a_quantized_export_what_our_reader_does(
    run: Run, tmp_path: Path, form: str
) -> None:
    outcome = export.export_checkpoint(str(run.path), tmp_path / "out", form_name=form)
    checks = {check.name: check for check in outcome.checks}
    print(form, checks["loss"].found)
    assert all(check.passed for check in outcome.checks), [check for check in outcome.checks if not check.passed]
    assert checks["same weights"].figures["difference"] < 1e-4
    assert checks["logits"].figures["relative_difference"] > 1e-4  # it is quantized


def test_without_what_the_proof_needs_a_quantized_export_is_refused_or_not_verified(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[compressed-tensors\]', or export with --no-verify"):
        call(run.path, tmp_path / "out", "--form", "int4")
    assert call(run.path, tmp_path / "out", "--form", "int4", "--no-verify").exit_code == 0
    assert "exported with `--no-verify`" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.usefixtures("in_this_process")
def test_a_model_of_ours_is_rebuilt_from_its_config(
    lab: TrainHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = lab.train({"model": {"build": "phalanx.models:transformer"}, "steps": 2}).run
    checks = export.export_checkpoint(str(own.path), tmp_path / "out").checks
    assert [(check.name, check.passed) for check in checks] == [
        (name, True) for name in ("load", "logits", "loss", "files")
    ]
    damage(monkeypatch, edit_weights(lambda tensors: tensors["blocks.0.ffn.up.weight"].zero_()))
    outcome = export.export_checkpoint(str(own.path), tmp_path / "other")
    assert "logits" in {check.name for check in outcome.checks if not check.passed}


@pytest.mark.usefixtures("in_this_process")
def test_an_image_processor_makes_the_inputs_of_training_or_fails(
    lab: TrainHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=2)
    transformers.ViTForImageClassification(config).save_pretrained(lab.folder / "vit")
    values = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "image_mean": [0.3] * 3}
    (lab.folder / "vit" / "preprocessor_config.json").write_text(json.dumps(values))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 16, 3), dtype=np.uint8)
    for name, images in zip("ab", pixels, strict=True):
        (lab.folder / "images" / name).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(lab.folder / "images" / name / f"{number}.png")
    monkeypatch.setattr(train_harness, "BASE_RECIPE", {**train_harness.BASE_RECIPE, "model": {}, "data": {}})
    data = {"source": {"images": "images", "image_size": [16, 16]}}
    recipe = {"model": {"build": "hf:vit"}, "task": "classification", "data": data, "steps": 2}
    trained = lab.train({**recipe, "evaluation": {"holdout_fraction": 0.2}}).run
    checks = export.export_checkpoint(str(trained.path), tmp_path / "out").checks
    assert [check.name for check in checks] == ["load", "image processor", "logits", "loss", "same weights", "files"]
    assert all(check.passed for check in checks)
    damage(monkeypatch, edit_json("preprocessor_config.json", image_mean=[0.5] * 3))
    checks = export.export_checkpoint(str(trained.path), tmp_path / "other").checks
    assert [check.name for check in checks if not check.passed] == ["image processor", "files"]


@pytest.mark.parametrize(
    ("files", "config", "found"),
    [
        ({"README.md": '---\nlicense: "mit"\ntags: [a]\n---\nlicense: gpl\n'}, {}, "mit"),
        ({"README.md": "license: mit\n", "LICENSE": "Apache License\n  Version 2.0"}, {}, "Apache License Version 2.0"),
        ({}, {"license": "cc-by-4.0"}, "cc-by-4.0"),
        ({}, {}, None),
    ],
)
def test_the_license_of_a_base_is_the_one_that_its_files_name(
    tmp_path: Path, files: dict[str, str], config: dict[str, str], found: str | None
) -> None:
    companions = Run(tmp_path).companions
    companions.mkdir()
    for name, text in files.items():
        (companions / name).write_text(text)
    assert find_license(Run(tmp_path), config) == found


def test_a_checkpoint_without_its_run_is_exported_only_without_a_proof(run: Run, tmp_path: Path) -> None:
    (checkpoint,) = list_checkpoints(run.checkpoints)[:1]
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    with pytest.raises(UsageError, match=r"the proof of an export needs the directory of its run, with plan\.json"):
        call(tmp_path / checkpoint.name, tmp_path / "out")
    assert call(tmp_path / checkpoint.name, tmp_path / "out", "--no-verify").exit_code == 0


class StandInLlama:
    """llama-cpp-python's model, computed by transformers from the files next to the GGUF file."""

    end_tokens = (0,)
    added_score = 0.0

    def __init__(self, path: str, **options: Any) -> None:
        folder = Path(path).parent
        self.network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.metadata = {"general.architecture": "llama", "tokenizer.chat_template": self.tokenizer.chat_template}
        self.model = self

    def n_vocab(self) -> int:
        return int(self.network.config.vocab_size)

    def tokenize(self, text: bytes, special: bool) -> list[int]:
        return list(self.tokenizer(text.decode(), split_special_tokens=not special)["input_ids"])

    def reset(self) -> None:
        self.tokens: list[int] = []

    def eval(self, tokens: list[int]) -> None:
        self.tokens += tokens
        with torch.no_grad():
            self.scores = self.network(torch.tensor([self.tokens])).logits[0].numpy()
        self.scores[:, 5] += self.added_score

    def generate(self, tokens: list[int], temp: float, repeat_penalty: float) -> Iterator[int]:
        self.reset()
        self.eval(list(tokens))
        while True:
            token = int(self.scores[-1].argmax())
            yield token
            self.eval([token])


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_this_process: None) -> type[StandInLlama]:
    """Stand-ins for llama-cpp-python, and for a converter that writes which dtype it was asked for."""
    lines = ["import sys", "print('line', file=sys.stderr)", "out = sys.argv[sys.argv.index('--outfile') + 1]"]
    (tmp_path / "convert.py").write_text("\n".join([*lines, "open(out, 'w').write(sys.argv[-1])"]))
    monkeypatch.setenv(CONVERTER_VARIABLE, str(tmp_path / "convert.py"))

    class Llama(StandInLlama):
        pass

    module: Any = ModuleType("llama_cpp")
    module.Llama, module.__version__ = Llama, "0"
    module.llama_model_get_vocab = lambda model: model
    module.llama_vocab_is_eog = lambda model, token: token in model.end_tokens
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(export_proof, "find_spec", lambda name: name)
    return Llama


def test_a_gguf_export_is_one_file_with_the_checks_of_llama_cpp(
    run: Run, tmp_path: Path, llama: type[StandInLlama]
) -> None:
    outcome = export.export_checkpoint(str(run.path), tmp_path / "out", form_name="gguf", dtype="fp16")
    assert outcome.files == ["LICENSE", "README.md", "export.json", "model.gguf"]
    assert (tmp_path / "out" / "model.gguf").read_text() == "f16"
    names = [check.name.removeprefix("gguf ") for check in outcome.checks if check.name.startswith("gguf ")]
    assert names == ["load", "tokenizer", "chat template", "end of text", "logits", "loss", "generation"]
    assert all(check.passed for check in outcome.checks)
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (record["form"], sorted(record["files"])) == ("gguf", ["LICENSE", "model.gguf"])


@pytest.mark.parametrize(
    ("attribute", "value", "failed"),
    [
        ("end_tokens", (7,), {"end of text"}),
        ("added_score", 9.0, {"logits", "loss", "generation"}),
        ("tokenize", lambda self, text, special: [1], {"tokenizer"}),
        ("n_vocab", None, {"load"}),
    ],
)
def test_a_gguf_that_llama_cpp_reads_otherwise_fails_and_is_kept_with_its_source(
    run: Run, tmp_path: Path, llama: type[StandInLlama], attribute: str, value: object, failed: set[str]
) -> None:
    setattr(llama, attribute, value)
    outcome = export.export_checkpoint(str(run.path), tmp_path / "out", form_name="gguf")
    assert {check.name for check in outcome.checks if not check.passed} == {f"gguf {name}" for name in failed}
    assert outcome.directory == tmp_path / "out.failed"
    assert {"model.gguf", "model.safetensors", "tokenizer.json"} <= set(outcome.files)


def test_without_llama_cpp_the_export_says_that_the_file_was_not_loaded(
    run: Run, tmp_path: Path, llama: type[StandInLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_proof, "find_spec", lambda name: None)
    outcome = export.export_checkpoint(str(run.path), tmp_path / "out", form_name="gguf")
    assert not any(check.name.startswith("gguf") for check in outcome.checks)
    assert "model.gguf itself was not loaded" in outcome.notes[-1]
    assert "model.gguf itself was not loaded" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("converter", "said"),
    [
        (None, r"PHALANX_GGUF_CONVERTER is not set; .*git clone .*llama\.cpp && pip install gguf"),
        ("none.py", r"none\.py: no such file"),
        ("wrong.py", r"wrong\.py ended with exit code 1; it says: ValueError: no such architecture"),
    ],
)
def test_a_missing_or_failing_converter_is_named_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converter: str | None, said: str
) -> None:
    (tmp_path / "wrong.py").write_text("raise ValueError('no such architecture')")
    monkeypatch.delenv(CONVERTER_VARIABLE, raising=False)
    if converter is not None:
        monkeypatch.setenv(CONVERTER_VARIABLE, str(tmp_path / converter))
    with pytest.raises(UsageError, match=said):
        call(run.path, tmp_path / "out", "--form", "gguf", "--no-verify")
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.py"]


def test_gguf_of_a_model_of_ours_is_refused(lab: TrainHarness, tmp_path: Path, llama: type[StandInLlama]) -> None:
    own = lab.train({"model": {"build": "phalanx.models:transformer"}, "steps": 2}).run
    with pytest.raises(UsageError, match=r"--form gguf: the converter needs a model of transformers"):
        call(own.path, tmp_path / "out", "--form", "gguf")


def test_the_cutting_of_texts_has_the_name_of_llama_cpp() -> None:
    levels = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    assert name_pre_tokenizer({**levels, "use_regex": True}) == "gpt-2"
    for regex, name in LLAMA_CPP_NAMES.items():
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
        assert name_pre_tokenizer({"type": "Sequence", "pretokenizers": [split, levels]}) == name
    assert name_pre_tokenizer({**levels, "use_regex": True, "add_prefix_space": True}) is None
    assert name_pre_tokenizer({"type": "Whitespace"}) is None


def test_a_tokenizer_that_the_converter_does_not_know_is_looked_up(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "base.py").write_text(
        "class TextModel:\n    def get_vocab_base_pre(self, tokenizer):\n        raise NotImplementedError\n"
    )
    (tmp_path / "convert.py").write_text(
        "import sys\nfrom conversion.base import TextModel\nmodel = TextModel()\nmodel.dir_model = sys.argv[1]\n"
        "open(sys.argv[3], 'w').write(model.get_vocab_base_pre(None))\n"
    )
    monkeypatch.setenv(CONVERTER_VARIABLE, str(tmp_path / "convert.py"))
    assert call(run.path, tmp_path / "out", "--form", "gguf", "--no-verify").exit_code == 0
    assert (tmp_path / "out" / "model.gguf").read_text() == "gpt-2"


@pytest.mark.skipif(NO_CONVERTER, reason="PHALANX_GGUF_CONVERTER is not set: no GGUF is really written")
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed: no GGUF is loaded")
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_llama_cpp_computes_with_a_gguf_export_what_the_checkpoint_does(run: Run, tmp_path: Path, dtype: str) -> None:
    outcome = export.export_checkpoint(str(run.path), tmp_path / "out", form_name="gguf", dtype=dtype)
    print(dtype, *(f"{check.name}: {check.found}" for check in outcome.checks), sep="\n")
    assert all(check.passed for check in outcome.checks), [check for check in outcome.checks if not check.passed]
    assert "gguf logits" in {check.name for check in outcome.checks}


@pytest.mark.usefixtures("in_this_process")
def test_a_pruned_model_is_smaller_proved_and_says_what_it_kept(run: Run, tmp_path: Path) -> None:
    arguments = ["prune", str(run.path), str(tmp_path / "out"), "--intermediate", "0.5", "--layers", "1"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "FAIL" not in result.output
    assert f"phalanx train RECIPE model.build=hf:{tmp_path / 'out'}" in result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["intermediate_size"], config["num_hidden_layers"]) == (128, 1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert re.search(r"\| kept \| PASS \| 128 of 256 channels, \d+\.\d% of the importance; 1 of 2 blocks", card)
    assert re.search(r"\| pruning \| PASS \| validation loss \d\.\d+ before, \d\.\d+ after", card)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("parallelism", "workers"), [pytest.param({"replicate": 2}, 2, marks=pytest.mark.slow), ({"shard": 2}, 2)]
)
def test_an_int4_export_holds_the_weights_that_int4_aware_training_computed_with(
    lab: TrainHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallelism: Values, workers: int
) -> None:
    monkeypatch.setattr(train_harness, "BASE_RECIPE", {**train_harness.BASE_RECIPE, "model": {}})
    model = {"build": "hf:origin-llama", "quantization_aware": "int4"}
    alone = HarnessRun(train(lab, "llama", model=model), 0, "")
    divided = HarnessRun(train(lab, "llama", workers, model=model, parallelism=parallelism), 0, "")
    assert max(divided.relative_differences(alone)) < 1e-5
    outcome = export.export_checkpoint(str(divided.run.path), tmp_path / "out", form_name="int4", verify=False)
    trained = load_trained_model(divided.run, None, False, torch.device("cpu")).model
    exported = load_export(outcome.directory, INT4_FORM)
    layers = {name: layer for name, layer in trained.named_modules() if isinstance(layer, Int4AwareLinear)}
    assert len(layers) == 7 * tiny.LAYERS
    for name, layer in layers.items():
        assert layer.scale_dtype == torch.bfloat16  # that of the files, and so of the export
        assert torch.equal(round_weight(layer.weight, layer.scale_dtype), exported.get_submodule(name).weight)
