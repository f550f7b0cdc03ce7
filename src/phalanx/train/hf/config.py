"""Read the config.json of a Hugging Face directory with a recipe's `model.args`, and refuse what training would ignore.

The config is what transformers reads from the values that an export writes, so a value in `model.args` means what it
means in the file: dependent values are computed from it, and values are checked together.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.data import DataInfo
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.imports import HF_CONFIG_FILE
from phalanx.recipe.validation_errors import describe_value, suggest_nearest
from phalanx.safe_files import read_text

LOAD_OPTIONS = ("attn_implementation", "experts_implementation")
"""Options of loading that transformers does not write to config.json."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of the weights' dtype: the second is that of transformers 4."""
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
QUANTIZATION_KEY = "quantization_config"
DEFAULT_LABEL = re.compile(r"LABEL_\d+")
"""Names that transformers gives to classes without names."""
AUTO_ARCHITECTURES = {
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
"""Names in `architectures` that stand for that of the model's family -> transformers' table of them."""
TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "NoneType": "null",
    "None": "null",
}


@dataclass(frozen=True)
class Architecture:
    """The class of a model, its config, and the values of config.json that make this config."""

    kind: type[nn.Module]
    config: Any
    values: Mapping[str, Any]
    is_auto: bool = False
    """Whether it was chosen by one of AUTO_ARCHITECTURES: a head that the files lack is new."""


def import_transformers() -> Any:
    """Import the transformers package. Raises RecipeError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise RecipeError(
            "model.build: hf:PATH needs the `transformers` package: pip install 'phalanx[huggingface]'"
        ) from None
    return transformers


def load_architecture(directory: Path, args: Mapping[str, Any]) -> Architecture:
    """Load the class and config of a directory's model, `args` in place of values of its config.json. Raises
    RecipeError if they make no model, or declare what training would not do."""
    transformers = import_transformers()
    where = directory / HF_CONFIG_FILE
    own = _read_config(directory)
    for key in DTYPE_KEYS:
        if key in args:
            raise RecipeError(
                f"model.args.{key}: weights are trained in fp32, and computed with in the recipe's `precision`; "
                "`phalanx checkpoint export --dtype` chooses the dtype of an export"
            )
    args = _merge_rope(own, args)
    values = own | args
    config = _build_config(where, values, args)
    aliases = getattr(config, "attribute_map", {})
    if any(key in aliases for key in args):  # as num_hidden_layers is n_layer in GPT-2: one of them must be left
        args = {aliases.get(key, key): value for key, value in args.items()}
        values = own | args
        config = _build_config(where, values, args)
    _check_names(where, args, own, config)
    _check_trainable(where, values, config)
    names = getattr(config, "architectures", None) or []
    if not isinstance(names, list):
        raise RecipeError(f"model.args.architectures: found {describe_value(names)}, expected a list of one name")
    if not names:
        raise RecipeError(
            f"model.build: {where} names no architecture; give one, as model.args.architectures=[LlamaForCausalLM]"
        )
    is_auto = names[0] in AUTO_ARCHITECTURES
    if is_auto:
        kind = getattr(transformers, AUTO_ARCHITECTURES[names[0]]).get(type(config), None)
        names = [names[0] if kind is None else kind.__name__]
        values["architectures"] = config.architectures = names
    else:
        kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RecipeError(
            f"model.build: {where}: transformers {transformers.__version__} has no architecture {names[0]!r}"
        )
    needless = {key for key in values if key in LOAD_OPTIONS or (key == QUANTIZATION_KEY and not values[key])}
    return Architecture(kind, config, {key: value for key, value in values.items() if key not in needless}, is_auto)


def get_text_config(config: Any) -> Any:
    """Return the part of a config that describes the language model: the config itself if there are no parts."""
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config


def check_data_fits(architecture: Architecture, facts: DataInfo) -> None:
    """Raise RecipeError if the data have tokens, positions or classes that the model does not support."""
    text = get_text_config(architecture.config)
    vocab, longest = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    if facts.vocab_size is not None and vocab is not None and facts.vocab_size > vocab:
        raise RecipeError(
            f"data.tokenizer: has {facts.vocab_size} tokens, but the model's vocabulary has {vocab}; "
            "use the tokenizer.json that belongs to the model, or give model.args.vocab_size="
            f"{-(-facts.vocab_size // 64) * 64}: rows of new tokens begin as the mean of the others"
        )
    if facts.seq_len is not None and longest is not None and facts.seq_len > longest:
        raise RecipeError(f"data.seq_len: {facts.seq_len} tokens, but the model has positions for {longest} only")
    labels = _get_labels(architecture)
    if labels and (facts.num_classes or 0) > len(labels):
        raise RecipeError(
            f"data.source: has {facts.num_classes} classes, but the model has outputs for {len(labels)} only"
        )
    numbers = {name: number for number, name in labels.items()}
    for number, name in enumerate(facts.class_names or ()):
        if numbers.get(name, number) != number:
            raise RecipeError(
                f"data.source: class {name!r} is number {number}, but the model's id2label has it as number "
                f"{numbers[name]}; rename the classes' folders so that their order is the model's, or give the data's "
                "names in model.args.id2label"
            )


def name_classes(architecture: Architecture, facts: DataInfo | None) -> dict[str, Any]:
    """Return the values of config.json that name the data's classes, if the model's classes have no names."""
    names = None if facts is None else facts.class_names
    labels = _get_labels(architecture)
    if names is None or len(names) != len(labels) or not all(map(DEFAULT_LABEL.fullmatch, labels.values())):
        return {}
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _get_labels(architecture: Architecture) -> Mapping[int, str]:
    """Return the names of a classifier's classes by number; those of other models mean nothing."""
    is_classifier = "Classification" in architecture.kind.__name__
    labels: Mapping[int, str] = getattr(architecture.config, "id2label", None) or {}
    return labels if is_classifier else {}


def _read_config(directory: Path) -> dict[str, Any]:
    """Read config.json."""
    where = directory / HF_CONFIG_FILE
    try:
        value = json.loads(read_text(where))
    except (OSError, ValueError, RecursionError, DataError) as error:
        raise RecipeError(f"model.build: {where}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise RecipeError(f"model.build: {where}: expected a JSON object, found {type(value).__name__}")
    return value


def _merge_rope(own: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` with the keys of transformers 4 for RoPE, and a base that they leave out, in `rope_parameters`, if
    config.json has that: transformers would take its default base, and not the file's."""
    merged, base = dict(args), own.get("rope_parameters")
    scaling = merged.get("rope_scaling", merged.get("rope_parameters"))
    named = any(key in merged for key in ROPE_KEYS)
    if not named or not isinstance(base, dict) or "rope_theta" not in base or not isinstance(scaling, dict | None):
        return merged
    kept = {key: value for key, value in merged.items() if key not in ROPE_KEYS}
    rope = base if scaling is None else {"rope_theta": base["rope_theta"], **scaling}
    return {**kept, "rope_parameters": {**rope, "rope_theta": merged.get("rope_theta", rope["rope_theta"])}}


def _build_config(where: Path, values: dict[str, Any], args: Mapping[str, Any]) -> Any:
    """Build the config that transformers reads from `values`, in which a whole number becomes a fraction where one is
    expected."""
    transformers = import_transformers()
    while True:
        try:
            # in memory: a worker that is killed here leaves no file behind
            with open(os.memfd_create(HF_CONFIG_FILE), "w") as file:
                json.dump(values, file)
                file.flush()
                path = f"/proc/self/fd/{file.fileno()}"
                return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            key = _find_field(error)
            if key in values and type(values[key]) is int and "float" in str(error):
                values[key] = float(values[key])
                continue
            raise _describe_config_error(error, where, values, args) from error


def _find_field(error: Exception) -> str:
    """Return the key that transformers' validation of a config names; "" if it names none."""
    match = re.match(r"Validation error for field '([^'\[.]+)", str(error))
    return match[1] if match else ""


def _describe_config_error(
    error: Exception, where: Path, values: Mapping[str, Any], args: Mapping[str, Any]
) -> RecipeError:
    """Make the error for values that transformers refuses: key, found and expected, as far as it says so."""
    transformers = import_transformers()
    if values.get("model_type") not in transformers.CONFIG_MAPPING:
        if "auto_map" in values:
            return RecipeError(
                f"model.build: {where}: auto_map names code of the directory's own, which is never run; convert the "
                "model to an architecture of transformers"
            )
        return RecipeError(
            f"model.build: {where}: transformers {transformers.__version__} knows no architecture of model_type "
            f"{values.get('model_type')!r}"
        )
    reason = re.sub(r"/proc/self/fd/\d+", str(where), " ".join(str(error.__cause__ or error).split()))
    key = _find_field(error)
    if not key:
        return RecipeError(f"{format_args(where, args)}: {reason}")
    named = f"model.args.{key}" if key in args else f"model.build: {where}: {key}"
    types = re.search(r"expected (.+?), got", reason) or re.search(r"any type in \((.+?),?\)\. Errors", reason)
    if types is None or key not in values:
        return RecipeError(f"{named}: {reason}")
    names = [name.strip() for name in re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", types[1]).split(",")]
    expected = " or ".join(dict.fromkeys(TYPE_NAMES.get(name, name) for name in names))
    return RecipeError(f"{named}: found {describe_value(values[key])}, expected {expected}")


def format_args(where: Path, args: Mapping[str, Any]) -> str:
    """Name what a model was built from, for errors that name no key."""
    if not args:
        return f"model.build: {where}"
    return f"model.args: {where} with {', '.join(f'{key}={describe_value(value)}' for key, value in args.items())}"


def _check_names(where: Path, args: Mapping[str, Any], own: Mapping[str, Any], config: Any) -> None:
    """Raise RecipeError for a key that the config does not have: transformers keeps and ignores it."""
    default = type(config)()
    known = {*own, *default.to_dict(), *LOAD_OPTIONS}
    for key in args:
        if key not in known and not hasattr(default, key):
            raise RecipeError(f"model.args.{key}: {where} has no such value{suggest_nearest(key, sorted(known))}")


def _check_trainable(where: Path, values: Mapping[str, Any], config: Any) -> None:
    """Raise RecipeError for what a config declares and training would ignore."""
    if quantization := values.get(QUANTIZATION_KEY):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise RecipeError(
            f"model.build: {where}: {QUANTIZATION_KEY}: the weights are quantized ({method}), which cannot be trained; "
            "save the model without quantization, or train the one that it was made from"
        )
    if coefficient := getattr(config, "z_loss_coefficient", None):
        raise RecipeError(
            f"model.args.z_loss_coefficient: {where} has {coefficient}, expected 0: the loss of large logits is not "
            "trained on"
        )
    for option in LOAD_OPTIONS:
        name = str(getattr(config, f"_{option}", None) or "")
        if "/" in name:
            what = "attention" if option == "attn_implementation" else "experts"
            raise RecipeError(
                f"model.build: {where}: {what} by {name!r} would fetch and run code; name one of transformers' own: "
                f"model.args.{option}={'sdpa' if option == 'attn_implementation' else 'eager'}"
            )
