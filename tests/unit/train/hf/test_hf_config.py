"""What config.json and model.args declare is used, or refused in one line that names key, found and expected."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.train.hf import model as hf_model
from phalanx.train.tasks import Classification, LanguageModeling, check_model_config

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config") / "mixtral"
    tiny.build_random_model("mixtral").save_pretrained(folder)
    return folder


def change_config(source: Path, folder: Path, **values: Any) -> Path:
    """A directory with other values in config.json, and no weights."""
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hidden_act": 3}, r"^model\.args\.hidden_act: found 3, expected text$"),
        ({"num_local_experts": "four"}, r'^model\.args\.num_local_experts: found "four", expected a whole number$'),
        ({"sliding_window": 4.5}, r"^model\.args\.sliding_window: found 4\.5, expected a whole number( or null)?$"),
        ({"architectures": "Mixtral"}, r'^model\.args\.architectures: found "Mixtral", expected a list'),
        ({"hidden_act": "nope"}, r"^model\.args: .* with hidden_act=\"nope\": MixtralForCausalLM cannot be built"),
        ({"layer_types": ["full_attention"]}, r"^model\.args: .* with layer_types=.*num_hidden_layers"),
        ({"attn_implementation": "nope"}, r"^model\.args: .* with attn_implementation=\"nope\""),
        ({"attn_implementation": "org/kernel"}, r"would fetch and run code.*model\.args\.attn_implementation=sdpa"),
        ({"dtype": "bfloat16"}, r"^model\.args\.dtype: .*`precision`.*export --dtype"),
        ({"hiden_act": "silu"}, r"^model\.args\.hiden_act: .*has no such value; did you mean hidden_act"),
    ],
)
def test_a_bad_value_of_args_is_one_line_with_its_key(mixtral: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        hf_model.build_on_meta(mixtral, args)
    assert "\n" not in str(caught.value)


def test_a_bad_value_of_the_file_is_one_line_with_its_key(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^model\.build: .*config\.json: hidden_act: found 3, expected text$"):
        hf_model.build_on_meta(change_config(mixtral, tmp_path, hidden_act=3), {})


def test_quantized_weights_are_refused(mixtral: Path, tmp_path: Path) -> None:
    folder = change_config(mixtral, tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(RecipeError, match=r"quantization_config: the weights are quantized \(fp8\)"):
        hf_model.build_on_meta(folder, {})
    hf_model.build_on_meta(folder, {"quantization_config": None})


def test_a_z_loss_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "mamba_n_heads": 4}
    config = transformers.BambaConfig(**sizes, mamba_d_head=16, architectures=["BambaForCausalLM"])
    config.z_loss_coefficient = 0.1
    config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"^model\.args\.z_loss_coefficient: .*config\.json has 0\.1, expected 0"):
        hf_model.build_on_meta(tmp_path, {})


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path, "llama")
    with pytest.raises(RecipeError, match=r"^model\.args: .* with num_attention_heads=3: .*hidden size \(32\).*\(3\)"):
        hf_model.build_on_meta(tmp_path, {"num_attention_heads": 3})


def test_a_config_is_read_without_temporary_files(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert hf_model.load_architecture(mixtral, {"num_hidden_layers": 1}).config.num_hidden_layers == 1


def test_a_whole_number_is_taken_where_a_fraction_is_meant(mixtral: Path, tmp_path: Path) -> None:
    args = {"router_aux_loss_coef": 1}
    assert hf_model.build_on_meta(mixtral, args).config.router_aux_loss_coef == 1.0
    exported = hf_model.describe_for_export(mixtral, args)["config"]
    assert type(exported["router_aux_loss_coef"]) is float, "transformers refuses a whole number"
    in_file = change_config(mixtral, tmp_path, router_aux_loss_coef=1)
    assert hf_model.build_on_meta(in_file, {}).config.router_aux_loss_coef == 1.0


def test_the_attention_that_errors_recommend_is_accepted_and_not_exported(mixtral: Path) -> None:
    args = {"attn_implementation": "eager"}
    assert hf_model.build_on_meta(mixtral, args).config._attn_implementation == "eager"
    assert "attn_implementation" not in hf_model.describe_for_export(mixtral, args)["config"]


def test_values_that_follow_from_others_follow_from_args_too(tmp_path: Path) -> None:
    tiny.save_random_model(tmp_path, "gpt2")
    model = hf_model.build_on_meta(tmp_path, {"num_hidden_layers": 1})
    assert (model.config.n_layer, len(model.transformer.h)) == (1, 1)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_type": "linear", "rope_theta": 5e4}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {"rope_type": "linear", "rope_theta": 5e4}),
        ({"rope_theta": 7e4}, {"rope_type": "default", "rope_theta": 7e4}),
    ],
)
def test_the_base_of_rope_stays_unless_args_name_another(
    mixtral: Path, tmp_path: Path, args: dict[str, Any], expected: dict[str, Any]
) -> None:
    folder = change_config(mixtral, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    built = hf_model.build_on_meta(folder, args).config.rope_parameters
    assert {key: built[key] for key in expected} == expected
    assert hf_model.load_architecture(folder, args).values["rope_parameters"].items() >= expected.items()


def make_classifier(folder: Path, **values: Any) -> Path:
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, **values)).save_pretrained(folder)
    return folder


def image_facts(*names: str) -> DataInfo:
    return DataInfo("images", None, len(names), None, (16, 16, 3), names)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({0: "dog", 1: "cat"}, r"data.source: class 'cat' is number 0, but the model's id2label has it as number 1"),
        ({0: "cat"}, r"data.source: has 2 classes, but the model has outputs for 1 only"),
    ],
)
def test_classes_in_another_order_or_number_than_the_models_are_refused(
    tmp_path: Path, labels: dict[int, str], message: str
) -> None:
    folder = make_classifier(tmp_path, id2label=labels, label2id={name: number for number, name in labels.items()})
    with pytest.raises(RecipeError, match=message):
        hf_model.build_on_meta(folder, {}, image_facts("cat", "dog"))


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_a_problem_that_classification_does_not_train_is_refused(tmp_path: Path, problem_type: str) -> None:
    model = hf_model.build_on_meta(make_classifier(tmp_path, problem_type=problem_type), {})
    with pytest.raises(RecipeError, match=f"declares problem_type '{problem_type}'"):
        check_model_config(Classification(), model)
    check_model_config(LanguageModeling(), model)
