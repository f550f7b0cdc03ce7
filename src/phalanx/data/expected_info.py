"""What a model must know of data that need not be here yet: a run is planned before its data reach a cluster."""

from pathlib import Path

from phalanx.data.manifest import read_manifest
from phalanx.data.prepare_plan import make_prepare_plan
from phalanx.data.reader import DataInfo
from phalanx.data.tokenizers import check_tokenizer, load_tokenizer
from phalanx.recipe.data_schema import BpeTokenizerConfig, DataConfig, DataSource


def expect_data_info(data: DataConfig, recipe_dir: Path) -> DataInfo:
    """Facts of a recipe's data, paths relative to `recipe_dir`. Of text only the tokenizer is asked; images are looked
    at, since only they tell their size and classes. RecipeError, DataError: what is asked is not there, or damaged."""
    source = data.source[0] if isinstance(data.source, list) else data.source
    if source.prepared is not None:
        manifest = read_manifest(recipe_dir / source.prepared)
        check_tokenizer(data, recipe_dir, recipe_dir / source.prepared)
        seq_len = data.seq_len if manifest.kind == "tokens" else None
        return DataInfo(manifest.kind, manifest.vocab, manifest.classes, seq_len, manifest.shape, manifest.labels)
    if _is_text_source(source):
        return DataInfo("tokens", _expected_vocab_size(data, recipe_dir), None, data.seq_len, None)
    plan = make_prepare_plan(source, data, recipe_dir)
    return DataInfo("images", None, plan.num_classes, None, plan.image_shape, plan.class_names)


def _is_text_source(source: DataSource) -> bool:
    return source.idx is None and source.images is None


def _expected_vocab_size(data: DataConfig, recipe_dir: Path) -> int:
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        return data.tokenizer.bpe
    if data.tokenizer == "bytes":
        return load_tokenizer("bytes").vocab_size
    return load_tokenizer(recipe_dir / data.tokenizer).vocab_size
