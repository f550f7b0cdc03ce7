"""Hugging Face directories: the architecture that config.json names, built without memory for its weights, and which
tensor of the files is which parameter.

`build` makes the model with parameters on the meta device; `tensor_names` maps its parameters to the files' tensors,
which `weight_source.py` reads by name and range, and `weights.py` into the parts that a worker holds; `materialise` and
`load` do it for one process that holds the whole model. How such a model is called stands in `huggingface_calls.py`.
Nothing here writes files.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from phalanx.bounded import read_text
from phalanx.data import Facts
from phalanx.errors import DataError, PhalanxError, RecipeError
from phalanx.models.bounds import DEEPEST
from phalanx.recipe.explain import nearest
from phalanx.recipe.imports import CONFIG, told
from phalanx.train.adapter import is_adapter
from phalanx.train.huggingface_calls import install
from phalanx.train.huggingface_names import ConvertedSource, converted
from phalanx.train.state import model_tensors
from phalanx.train.weight_source import WeightSource, aliases, copy_into, plain_name, weight_source

MOST = 5
"""So many tensors are named in an error."""
LEFT_OVER = (r"(^|\.)rotary_emb\.inv_freq$", r"(^|\.)attn\.(masked_)?bias$", r"(^|\.)(position|token_type)_ids$")
"""Tensors of older files that today's models compute by themselves."""
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Endings under which files that came from TensorFlow hold a parameter."""


def build(directory: Path, args: Mapping[str, Any], facts: Facts | None = None) -> nn.Module:
    """The model of a directory, `args` replacing values of its config.json, with parameters on the meta device (fp32)
    and real buffers on the CPU, taking what our tasks give. With `facts` it is checked that the data fit it.

    RecipeError: transformers is not installed, config.json is not of a known architecture, `args` do not fit it, or
    the data have more tokens or longer samples than it.
    """
    kind, config = _architecture(directory, args)
    if facts is not None:
        _check_facts(config, facts)
    try:
        with _parameters_on_meta():
            model: nn.Module = kind(config)
    except Exception as error:
        raise RecipeError(f"model.build: {directory}: {kind.__name__} cannot be built: {told(error)}") from error
    install(model)
    return model


def build_loaded(directory: Path, args: Mapping[str, Any], facts: Facts | None, device: torch.device) -> nn.Module:
    """The whole model of a directory, with its weights, on a device. Errors as of `build` and `tensor_names`."""
    model = build(directory, args, facts)
    source = source_for(model, directory)
    names = tensor_names(model, source)
    materialise(model, device)
    load(model, source, names)
    return model


def source_for(model: nn.Module, directory: Path) -> WeightSource:
    """The tensors of a directory as the model has them. Errors as of `weight_source` and `converted`."""
    return converted(model, weight_source(directory))


def tensor_names(model: nn.Module, source: WeightSource) -> dict[str, list[str]]:
    """Which tensors of the files a parameter or persistent buffer is: one, or, where the model ties what the files hold
    twice, several that must be equal. Models of a base and a head find their tensors with and without the base's
    prefix (`model.`, `transformer.`). Adapters are left out. Reads headers only; nothing about the model's memory is
    asked.

    DataError naming tensors that the files lack, hold beyond the model's, or hold in another shape.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, list[str]] = {}
    parameters = dict(model.named_parameters())
    for name, places in _places(model).items():
        if is_adapter(name):
            continue
        there = [held for place in places for held in _candidates(place, prefix) if held in source.files]
        found[name] = list(dict.fromkeys(there))
    optional = _patterns(model, "_keys_to_ignore_on_load_missing")
    # What may be missing is what a model computes, which only buffers have done when they are built.
    missing = [name for name, held in found.items() if not held and (name in parameters or not _any(optional, name))]
    used = {held for names in found.values() for held in names}
    computed = {name for name, _ in model.named_buffers()} - found.keys()
    needless = [*LEFT_OVER, *_patterns(model, "_keys_to_ignore_on_load_unexpected")]
    extra = [
        name
        for name in sorted(source.names - used)
        if not _any(needless, name) and not any(it in computed for it in _candidates(name, prefix))
    ]
    kind = type(model).__name__
    if missing:
        raise DataError(f"{source.path}: {kind} needs {_several(missing)}, which the files lack{_hint(missing, extra)}")
    if extra:
        raise DataError(f"{source.path}: {kind} has no place for {_several(extra)}{_hint(missing, extra)}")
    tensors = model_tensors(model)
    for name, names in found.items():
        for held in names:
            if source.shape(held) != tuple(tensors[name].shape):
                shapes = f"{list(source.shape(held))}, {kind} by its {CONFIG} {list(tensors[name].shape)}"
                raise DataError(f"{source.files[held]}: {held} has shape {shapes}")
    return {name: names for name, names in found.items() if names}


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give every parameter on the meta device memory on `device`, without values; what was tied stays tied. Buffers,
    which have values already, move there."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta and id(parameter) not in made:
            empty = torch.empty_like(parameter, device=device)
            made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        _put(model, name, made.get(id(parameter), parameter))
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        _put(model, name, buffer.to(device))


def load(model: nn.Module, source: WeightSource, names: Mapping[str, list[str]]) -> None:
    """Read all weights into the model, converted to its dtype, one tensor at a time. DataError when tensors that the
    model ties differ."""
    tensors = model_tensors(model)
    for name, (first, *others) in names.items():
        copy_into(tensors[name], source, first)
        for other in others:
            if not torch.equal(source.read(first), source.read(other)):
                raise differ(source, first, other)


def differ(source: WeightSource, first: str, other: str) -> DataError:
    """Two tensors of the files differ that the model ties."""
    return DataError(
        f"{source.path}: {first} and {other} differ, but {CONFIG} ties them; "
        "model.args.tie_word_embeddings=false keeps both"
    )


def describe(directory: Path, args: Mapping[str, Any]) -> dict[str, Any]:
    """What an export needs to write such a directory again: its path, config.json with `args` in it, the names in its
    files of those tensors that the model calls otherwise, which are made of which, and which parameters are one."""
    model = build(directory, args)
    source = source_for(model, directory)
    names = {name: held[0] for name, held in tensor_names(model, source).items()}
    made: list[dict[str, list[str]]] = []
    if isinstance(source, ConvertedSource):
        made = source.groups()
        names = {name: source.original(held) for name, held in names.items() if name not in source.conversions}
    return {
        "directory": str(directory.absolute()),
        "config": _read_config(directory) | dict(args),
        "names": {name: held for name, held in names.items() if held != name},
        "converted": made,
        "tied": aliases(model),
    }


def check(directory: Path, args: Mapping[str, Any]) -> None:
    """Whether a model can be built and its weights are all there, by the files' headers. Errors as of `build` and
    `tensor_names`."""
    model = build(directory, args)
    tensor_names(model, source_for(model, directory))


def preload(directory: str) -> None:
    """Import what a model of this directory needs: in a process from which workers are forked, so that not each has to.
    What is wrong with the directory is not told here: whoever uses it will."""
    with suppress(PhalanxError):
        _architecture(Path(directory), {})


def library() -> Any:
    """The transformers package. RecipeError when it is not installed."""
    try:
        import transformers
    except ImportError:
        raise RecipeError(
            "model.build: hf:PATH needs the `transformers` package: pip install 'phalanx[huggingface]'"
        ) from None
    return transformers


def _architecture(directory: Path, args: Mapping[str, Any]) -> tuple[type[nn.Module], Any]:
    """The model's class and config."""
    transformers = library()
    where = directory / CONFIG
    _read_config(directory)
    try:
        config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if "auto_map" in _read_config(directory):
            raise RecipeError(
                f"model.build: {where}: auto_map names code of the directory's own, which is never run; convert the "
                "model to an architecture of transformers"
            ) from None
        kind = _read_config(directory).get("model_type")
        version = transformers.__version__
        raise RecipeError(
            f"model.build: {where}: transformers {version} knows no architecture of model_type {kind!r} ({told(error)})"
        ) from error
    known = config.to_dict()
    for key, value in args.items():
        if key not in known and not hasattr(config, key):
            raise RecipeError(f"model.args.{key}: {where} has no such value{nearest(key, sorted(known))}")
        setattr(config, key, value)
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > DEEPEST:
        raise RecipeError(f"model.args.num_hidden_layers: {where} has {layers} layers, expected at most {DEEPEST}")
    names = getattr(config, "architectures", None) or []
    if not names:
        raise RecipeError(
            f"model.build: {where} names no architecture; give one, as model.args.architectures=[LlamaForCausalLM]"
        )
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RecipeError(
            f"model.build: {where}: transformers {transformers.__version__} has no architecture {names[0]!r}"
        )
    kernel = str(getattr(config, "_attn_implementation", None) or "")
    if "/" in kernel:
        raise RecipeError(
            f"model.build: {where}: attention by {kernel!r} would fetch and run code; name one of transformers' own: "
            "model.args.attn_implementation=sdpa"
        )
    return kind, config


def _read_config(directory: Path) -> dict[str, Any]:
    """config.json as it stands there."""
    where = directory / CONFIG
    try:
        value = json.loads(read_text(where))
    except (OSError, ValueError, RecursionError, DataError) as error:
        raise RecipeError(f"model.build: {where}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise RecipeError(f"model.build: {where}: expected a JSON object, found {type(value).__name__}")
    return value


def _check_facts(config: Any, facts: Facts) -> None:
    """RecipeError when the data have tokens or positions that the model has not."""
    vocab, longest = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if facts.vocab is not None and vocab is not None and facts.vocab > vocab:
        raise RecipeError(
            f"data.tokenizer: has {facts.vocab} tokens, but the model's vocabulary has {vocab}; "
            "use the tokenizer.json that belongs to the model"
        )
    if facts.sequence is not None and longest is not None and facts.sequence > longest:
        raise RecipeError(f"data.seq_len: {facts.sequence} tokens, but the model has positions for {longest} only")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as soon as a module registers them, before anything is drawn for them; buffers are
    computed as ever. (On the meta device as a whole, buffers that no file holds, such as rotary frequencies, would be
    lost.)"""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    hook: Callable[..., Any] = without_memory
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _places(model: nn.Module) -> dict[str, list[str]]:
    """Each tensor that has to be loaded, by its first name: all names that it has."""
    tensors = model_tensors(model)
    everything: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    everything += model.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    for name, tensor in everything:
        owner = first.setdefault(id(tensor), name)
        if owner in tensors:
            places.setdefault(owner, []).append(name)
    return places


def _candidates(name: str, prefix: str) -> list[str]:
    """Names that a tensor may have in a file."""
    plain = plain_name(name)
    names = list(dict.fromkeys([name, plain, plain.removeprefix("module.")]))
    if len(prefix) > 1:
        names += [name.removeprefix(prefix) if name.startswith(prefix) else prefix + name]
    old = [
        one.removesuffix(ending) + before
        for one in names
        for ending, before in OLD_NAMES.items()
        if one.endswith(ending)
    ]
    return names + old


def _patterns(model: nn.Module, attribute: str) -> list[str]:
    """Regular expressions of names that a model of transformers declares."""
    return list(getattr(model, attribute, None) or [])


def _any(patterns: list[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _several(names: list[str]) -> str:
    rest = len(names) - MOST
    listed = ", ".join(names[:MOST])
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    return f"{count} ({listed}{f' and {rest} more' if rest > 0 else ''})"


def _hint(missing: list[str], extra: list[str]) -> str:
    """What would be right."""
    if missing and extra:
        return f"; they hold {_several(extra)} instead: model.args.architectures must name what was saved here"
    if missing:
        return "; save the whole model again with save_pretrained, or name what was saved in model.args.architectures"
    return "; name an architecture that has them in model.args.architectures, or save the model again"


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter or buffer of that name."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)
