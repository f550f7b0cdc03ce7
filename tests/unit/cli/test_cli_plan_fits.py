"""`phalanx plan --fits`: the longest sequences on common GPUs from config.json alone, and what it refuses."""

import json
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.errors import ExitCode

LLAMA_2_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 32000,
}
RECIPE = """
name: qadapter
model: {build: "hf:model"}
adapter: {rank: 16}
data: {source: {text: "*.txt"}, tokenizer: bytes, seq_len: 2048}
steps: 10
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and a model's config.json, without weights."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(LLAMA_2_70B))
    return tmp_path


def plan_fits(*arguments: str) -> int:
    return main.main(["plan", "recipe.yaml", "--fits", *arguments])


def read_lengths(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, list[int]]:
    """The longest sequences by format of the base, smallest GPU first."""
    assert plan_fits("--json", *overrides) == 0
    bases = json.loads(capsys.readouterr().out)
    return {base["base_dtype"]: list(base["max_seq_len"].values()) for base in bases}


def test_a_table_says_which_70b_base_fits_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_fits() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "69.0 G parameters; adapters of rank 16: 207 M"
    assert "RTX 4090 24 GiB" in lines[3]
    assert lines[4].split()[:3] == ["fp32", "(this", "recipe)"]
    assert lines[4].split()[-5:] == ["-"] * 5
    assert lines[6].split()[:5] == ["nf4", "38.6", "GiB", "-", "-"]
    assert all(length.replace(",", "").isdigit() for length in lines[6].split()[5:])
    assert not list(Path().glob("*.planned.yaml"))


def test_more_memory_and_fewer_bits_allow_longer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = read_lengths(capsys)
    assert all(values == sorted(values) for values in lengths.values())
    assert lengths["fp32"][-1] < lengths["int8"][-1] < lengths["nf4"][-1]


@pytest.mark.parametrize("override", ["memory.activation_checkpointing=none", "memory.chunked_loss=false"])
def test_what_takes_memory_shortens_sequences(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = "model.args={vocab_size: 256000}"
    lengths, shorter = read_lengths(capsys, vocabulary), read_lengths(capsys, vocabulary, override)
    assert 0 < shorter["nf4"][-1] < lengths["nf4"][-1]


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("adapter=null", ExitCode.USAGE, "--fits: the recipe trains all weights"),
        (
            "adapter={target_modules: [query]}",
            ExitCode.RECIPE,
            "adapter.target_modules: found query; --fits expects names",
        ),
        ("model.build=phalanx.models:transformer", ExitCode.RECIPE, "--fits reads the config.json of hf:PATH"),
        ("model.build=hf:nowhere", ExitCode.RECIPE, "expected hf:PATH with a config.json at "),
    ],
)
def test_what_it_cannot_answer_is_refused(
    override: str, code: ExitCode, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_fits(override) == code
    assert message in capsys.readouterr().err


def test_a_config_of_another_kind_of_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model/config.json").write_text('{"model_type": "gpt2", "n_embd": 768}')
    assert plan_fits() == ExitCode.RECIPE
    assert "has no hidden_size; --fits expects that of a decoder" in capsys.readouterr().err
