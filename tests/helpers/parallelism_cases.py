"""The parity matrix as data: which runs are compared with one process. `world/test_parity.py` trains them, and the
table of docs/how-to/parallelism.md is made of nothing else.

    python tests/helpers/parallelism_cases.py          # write the table into docs/how-to/parallelism.md

The runs cover each pair of values of two factors (a parallelism with a model, an optimizer with a precision, ...).
Parallelisms of three dimensions and more are in one run each.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Values = dict[str, Any]

STEPS = 10
GLOBAL_SIZE = 8
MICRO_SIZE = 2
TRAINING: Values = {
    "steps": STEPS,
    "batch": {"global_size": GLOBAL_SIZE, "micro_size": MICRO_SIZE},
    "checkpoint": {"every": None},
    "evaluation": {"every": STEPS},
    "callbacks": [],
    "determinism": "off",
    "memory": {"activation_checkpointing": "none"},
}
# The default rate of AdamW: it makes steps of full size of gradients that are mostly rounding, so a higher one shows
# how fast rounding grows, not whether the gradient is right.
LEARNING_RATE = {"adamw": 1e-3, "muon": 1e-3, "lamb": 1e-2}
BLOCKS = 4
SIZES: Values = {"layers": BLOCKS, "hidden_size": 32, "num_heads": 4}
TOKENS: Values = {"source": {"text": "few.txt"}, "seq_len": 32}
IMAGES: Values = {"source": {"text": None, "idx": {"images": "parity.images", "labels": "parity.labels"}}}


@dataclass(frozen=True)
class Model:
    """A kind of model: how a recipe builds it, and the parallelisms that a recipe with it is refused for."""

    build: str
    args: Values = field(default_factory=dict)
    dropout_args: tuple[str, ...] = ("dropout",)
    changes: Values = field(default_factory=lambda: {"data": TOKENS})
    refused: frozenset[str] = frozenset({"expert"})

    @property
    def is_text(self) -> bool:
        return "task" not in self.changes


MODELS = {
    "transformer": Model("user_models:partly_frozen", {**SIZES, "num_kv_heads": 2, "tie_embeddings": True}),
    "mixture of experts": Model(
        "phalanx.models:moe",
        {**SIZES, "num_experts": 4, "dense_layers": 1, "shared_expert_hidden_size": 16, "tie_embeddings": False},
        refused=frozenset(),
    ),
    "hf Llama": Model("hf:parity-llama", dropout_args=("attention_dropout",)),
    "hf Mixtral": Model(
        "hf:parity-mixtral", dropout_args=("attention_dropout",), refused=frozenset({"expert", "tensor", "pipeline"})
    ),
    "hf GPT-2": Model("hf:parity-gpt2", dropout_args=("attn_pdrop", "resid_pdrop", "embd_pdrop")),
    "image classifier": Model(
        "user_models:image_classifier",
        {"hidden_size": 32, "blocks": BLOCKS},
        changes={"data": IMAGES, "task": "classification"},
        refused=frozenset({"expert", "tensor", "context"}),
    ),
}
DIMENSIONS = ("replicate", "shard", "tensor", "pipeline", "context", "expert")


@dataclass(frozen=True)
class Layout:
    """A parallelism, and the one under which its checkpoint is read and written again."""

    values: Values
    moved_to: Values = field(default_factory=lambda: {"replicate": 1})

    @property
    def workers(self) -> int:
        product = 1
        for name in DIMENSIONS:
            product *= self.values.get(name, 1) if name != "expert" else 1
        return product

    def fits(self, model: Model) -> bool:
        """Whether a recipe with the model may ask for this parallelism."""
        return not model.refused & set(self.values)

    def __str__(self) -> str:
        sizes = [f"{name} {self.values[name]}" for name in DIMENSIONS if name in self.values]
        more = [str(self.values["pipeline_schedule"])] if "pipeline_schedule" in self.values else []
        more += ["async_tp"] if "async_tp" in self.values else []
        if "layers_per_stage" in self.values:
            more.append("stages of " + ", ".join(map(str, self.values["layers_per_stage"])) + " blocks")
        return " x ".join(sizes) + (f" ({'; '.join(more)})" if more else "")


LAYOUTS = (
    Layout({"replicate": 2}, moved_to={"shard": 2}),
    Layout({"shard": 2}, moved_to={"tensor": 2}),
    Layout({"tensor": 2}, moved_to={"pipeline": 2}),
    Layout({"tensor": 2, "async_tp": True}, moved_to={"tensor": 2}),
    Layout({"context": 2}, moved_to={"replicate": 2}),
    Layout({"pipeline": 2}, moved_to={"context": 2}),
    Layout({"pipeline": 2, "pipeline_schedule": "gpipe", "layers_per_stage": [1, 3]}, {"shard": 2}),
    Layout({"pipeline": 2, "pipeline_schedule": "interleaved"}, {"shard": 2}),
    Layout({"pipeline": 2, "pipeline_schedule": "zero-bubble"}, {"tensor": 2}),
    Layout({"shard": 2, "expert": 2}, {"shard": 2}),
    Layout({"shard": 4}, moved_to={"shard": 2, "tensor": 2}),
    Layout({"context": 4}),
    Layout({"pipeline": 4}, {"pipeline": 2}),
    Layout({"replicate": 2, "shard": 2}, moved_to={"tensor": 2}),
    Layout({"replicate": 2, "tensor": 2}, moved_to={"shard": 4}),
    Layout({"replicate": 2, "pipeline": 2}),
    Layout({"replicate": 2, "context": 2}, moved_to={"shard": 2}),
    Layout({"shard": 2, "tensor": 2}, moved_to={"pipeline": 2}),
    Layout({"shard": 2, "pipeline": 2}, moved_to={"tensor": 2}),
    Layout({"shard": 2, "context": 2}, moved_to={"shard": 2}),
    Layout({"tensor": 2, "context": 2}, moved_to={"replicate": 2}),
    Layout({"tensor": 2, "pipeline": 2}, moved_to={"shard": 2}),
    Layout({"context": 2, "pipeline": 2}, moved_to={"shard": 2}),
    Layout({"shard": 4, "expert": 2}, {"shard": 2, "expert": 2}),
)
DEEP_LAYOUTS = (
    Layout({"shard": 2, "tensor": 2, "expert": 2}),
    Layout({"context": 2, "pipeline": 2, "expert": 2}, {"shard": 2}),
    Layout({"replicate": 2, "shard": 2, "tensor": 2}, {"shard": 2}),
    Layout({"replicate": 2, "shard": 2, "context": 2}, {"shard": 2}),
    Layout({"shard": 2, "tensor": 2, "pipeline": 2}, moved_to={"replicate": 2}),
    Layout({"shard": 2, "tensor": 2, "context": 2}, {"tensor": 2}),
    Layout({"replicate": 2, "shard": 2, "tensor": 2, "expert": 2}, {"shard": 4, "expert": 4}),
)


@dataclass(frozen=True)
class Case:
    """A run of the matrix. `documents`: plain windows, or packed documents with masks, and frozen parameters where the
    model has some. `evaluation`: whether its last micro-batch is as large as the others."""

    layout: Layout
    model: str
    precision: str
    dropout: float
    optimizer: str
    documents: str
    evaluation: str

    @property
    def changes(self) -> Values:
        """The recipe without its parallelism: what the run has in common with one process."""
        return self._make_changes(MICRO_SIZE)

    @property
    def recomputes(self) -> bool:
        """Whether blocks are recomputed, which has to draw the same random numbers again."""
        return self.documents == "packed" and self.dropout > 0

    def changes_with_micro_size(self, micro_size: int) -> Values:
        """The recipe without dropout, whose masks differ by micro-batch size, on micro-batches of another size."""
        return replace(self, dropout=0.0, evaluation="even")._make_changes(micro_size)

    def _make_changes(self, micro_size: int) -> Values:
        model = MODELS[self.model]
        args = {**model.args, **dict.fromkeys(model.dropout_args, self.dropout)}
        data = model.changes["data"]
        if self.documents == "packed":
            data = {**data, "source": [{"jsonl": "documents.jsonl"}], "document_masking": True, "packing": "whole"}
            args |= {"num_frozen": 2} if model.build == "user_models:partly_frozen" else {}
        max_samples = 4 * MICRO_SIZE - (self.evaluation == "uneven")
        return {
            **TRAINING,
            **model.changes,
            "data": data,
            "model": {"build": model.build, "args": args},
            "precision": self.precision,
            "batch": {"global_size": GLOBAL_SIZE, "micro_size": micro_size},
            "evaluation": {**TRAINING["evaluation"], "max_samples": max_samples},
            "memory": {"activation_checkpointing": "full" if self.recomputes else "none"},
            "optimizer": {
                "name": self.optimizer,
                "lr": LEARNING_RATE[self.optimizer],
                "max_grad_norm": 0.5,
                "schedule": {"warmup_steps": 5},
            },
        }

    def __str__(self) -> str:
        choices = (self.precision, f"dropout {self.dropout:g}", self.optimizer, self.documents, self.evaluation)
        return f"{self.layout}, {self.model}, {', '.join(choices)}"


FACTORS: dict[str, list[Any]] = {
    "layout": list(LAYOUTS),
    "model": list(MODELS),
    "precision": ["fp32", "bf16"],
    "dropout": [0.0, 0.2],
    "optimizer": ["adamw", "muon", "lamb"],
    "documents": ["plain", "packed"],
    "evaluation": ["even", "uneven"],
}


def draw_case(rng: random.Random, max_workers: int) -> Case:
    """Draw a case with any values of the factors that may stand in one recipe."""
    layouts = [layout for layout in (*LAYOUTS, *DEEP_LAYOUTS) if layout.workers <= max_workers]
    return _draw_allowed(rng, {"layout": rng.choice(layouts)})


def _draw_allowed(rng: random.Random, chosen: Values) -> Case:
    """Draw the values of factors that are not chosen."""
    while True:
        row = {**{name: rng.choice(values) for name, values in FACTORS.items()}, **chosen}
        if _is_allowed(row):
            return Case(**row)


def _is_allowed(row: Values) -> bool:
    """Whether the values of these factors may stand in one recipe."""
    if row.get("optimizer") == "muon" and "tensor" in getattr(row.get("layout"), "values", ()):
        return False  # Muon works on whole matrices
    if "model" not in row:
        return True
    model = MODELS[row["model"]]
    if "layout" in row and not row["layout"].fits(model):
        return False
    return model.is_text or row.get("documents") != "packed"


def _cover_pairs() -> list[Case]:
    """Choose rows that hold each allowed pair of values of two factors, greedily: a row begins with the first pair that
    is not covered, and takes of each other factor the value that covers most, then the one that was used least."""
    pairs = [
        ((first, i), (second, j))
        for first, second in itertools.combinations(FACTORS, 2)
        for i in range(len(FACTORS[first]))
        for j in range(len(FACTORS[second]))
        if _is_allowed({first: FACTORS[first][i], second: FACTORS[second][j]})
    ]
    missing = dict.fromkeys(pairs)
    uses: Counter[tuple[str, int]] = Counter()
    rows: list[Case] = []
    while missing:
        row = dict(next(iter(missing)))
        for name in sorted(FACTORS.keys() - row.keys(), key=["model", *FACTORS].index):
            scores = [(_count_new({**row, name: i}, missing), -uses[name, i]) for i in range(len(FACTORS[name]))]
            row[name] = scores.index(max(scores))
        uses.update(row.items())
        for pair in _pairs_of(row):
            missing.pop(pair, None)
        rows.append(Case(**{name: FACTORS[name][index] for name, index in row.items()}))
    return rows


def _pairs_of(row: dict[str, int]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Pairs of factors and indices of their values, in the order of FACTORS."""
    items = [(name, row[name]) for name in FACTORS if name in row]
    return list(itertools.combinations(items, 2))


def _count_new(row: dict[str, int], missing: dict[Any, None]) -> int:
    """Count the pairs of a row that are not covered; -1 if the row is refused."""
    if not _is_allowed({name: FACTORS[name][index] for name, index in row.items()}):
        return -1
    return sum(pair in missing for pair in _pairs_of(row))


def _cover_deep_layouts() -> Iterator[Case]:
    """Give each deep layout a model in turn, and other values at random."""
    rng = random.Random(0)
    for index, layout in enumerate(DEEP_LAYOUTS):
        names = [name for name, model in MODELS.items() if layout.fits(model)]
        chosen = {"layout": layout, "model": names[index % len(names)]}
        yield _draw_allowed(rng, chosen)


CASES = (*_cover_pairs(), *_cover_deep_layouts())


def _choose_quick() -> list[Case]:
    """Choose a case of each parallelism of two workers and one of four, with the model that was chosen least before."""
    uses: Counter[str] = Counter()
    quick = []
    for layout in LAYOUTS:
        if layout.workers == 2 or layout.values == {"shard": 2, "context": 2}:
            cases = [case for case in CASES if case.layout == layout]
            quick.append(min(cases, key=lambda case: uses[case.model]))
            uses[quick[-1].model] += 1
    return quick


QUICK = _choose_quick()
"""What `make test` runs: all parallelisms of two workers, models, precisions, dropout, and even and uneven batches."""
QUICK_MOVED: tuple[Values, ...] = (
    {"shard": 2},
    {"tensor": 2},
    {"pipeline": 2, "pipeline_schedule": "interleaved"},
    {"shard": 2, "expert": 2},
)


def _choose_moved() -> list[Case]:
    """Choose a case of each parallelism whose model can also have the one that its checkpoint is read under; a quick
    one where there is such."""
    return [
        next(
            case
            for case in (*QUICK, *CASES)
            if case.layout == layout and Layout(layout.moved_to).fits(MODELS[case.model])
        )
        for layout in (*LAYOUTS, *DEEP_LAYOUTS)
    ]


MOVED = _choose_moved()


def table() -> str:
    """Parallelisms x models in Markdown: what is tested, and what a recipe is refused for."""
    lines = ["| workers | parallelism | " + " | ".join(MODELS) + " |", "|---:|---|" + ":-:|" * len(MODELS)]
    tested = {(str(case.layout), case.model) for case in CASES}
    for layout in sorted((*LAYOUTS, *DEEP_LAYOUTS), key=lambda layout: layout.workers):
        words = (
            "yes" if (str(layout), name) in tested else "-" if layout.fits(model) else "refused"
            for name, model in MODELS.items()
        )
        lines.append(f"| {layout.workers} | {layout} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "parallelism.md"
FIRST_CELL = "| workers | parallelism |"


def replace_table(page: str) -> str:
    """Return the page with the table of this module in the place of the one it has."""
    before, _, rest = page.partition(FIRST_CELL)
    _, separator, after = rest.partition("\n\n")
    return before + table() + (separator[1:] + after if separator else "")


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
