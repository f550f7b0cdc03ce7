"""What a model must know of data that need not be here yet: a run is planned before its data reach a cluster."""

from pathlib import Path

from phalanx.data.manifest import read_manifest
from phalanx.data.pieces import make_plan
from phalanx.data.reader import Facts
from phalanx.data.tokenizers import check_tokenizer, load_tokenizer
from phalanx.recipe.schema import BpeTokenizerConfig, DataConfig, DataSource


def foretold(data: DataConfig, folder: Path) -> Facts:
    """Facts of a recipe's data, paths relative to `folder`. Of text only the tokenizer is asked; images are looked at,
    since only they tell their size and classes. RecipeError, DataError: what is asked is not there, or damaged."""
    source = data.source[0] if isinstance(data.source, list) else data.source
    if source.prepared is not None:
        manifest = read_manifest(folder / source.prepared)
        check_tokenizer(data, folder, folder / source.prepared)
        sequence = data.seq_len if manifest.kind == "tokens" else None
        return Facts(manifest.kind, manifest.vocab, manifest.classes, sequence, manifest.shape)
    if _is_text(source):
        return Facts("tokens", _vocab(data, folder), None, data.seq_len, None)
    plan = make_plan(source, data, folder)
    return Facts("images", None, plan.classes, None, plan.shape)


def _is_text(source: DataSource) -> bool:
    return source.idx is None and source.images is None


def _vocab(data: DataConfig, folder: Path) -> int:
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        return data.tokenizer.bpe
    if data.tokenizer == "bytes":
        return load_tokenizer("bytes").vocab
    return load_tokenizer(folder / data.tokenizer).vocab
