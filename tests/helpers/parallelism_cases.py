"""Which layouts are tested with which features, as data: `world/test_parity.py` runs every cell, and the table of
docs/how-to/parallelism.md is made of nothing else.

    python tests/helpers/parallelism_cases.py          # the table, in Markdown
"""

from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]

STEPS = 20
SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
TRAINING: Values = {
    "steps": STEPS,
    "batch": {"global_size": 16, "micro_size": 2},
    "checkpoint": {"every": 10},
    "evaluation": {"every": 20},
    "callbacks": [],
    # The recipe's own default: AdamW makes steps of full size of gradients that are mostly rounding, so a higher rate
    # shows how fast rounding grows, not whether the gradient is right.
    "optimizer": {"lr": 1e-3, "schedule": {"warmup_steps": 5}},
}


@dataclass(frozen=True)
class Case:
    """A run that is compared with one process, and the features that are on in it."""

    name: str
    features: tuple[str, ...]
    changes: Values = field(default_factory=dict)


def first(layers: int) -> Case:
    """Everything summed, averaged and clipped, with one weight in two places."""
    model = {"args": {**SIZES, "layers": layers, "tie_embeddings": True}}
    return Case(
        f"tied-{layers}",
        ("accumulation", "clipping", "tied embeddings"),
        {**TRAINING, "model": model, "optimizer": {**TRAINING["optimizer"], "max_grad_norm": 0.5}},
    )


def second(layers: int) -> Case:
    """Several documents and padding in a sample, parts that do not train, activations made again."""
    return Case(
        f"packed-{layers}",
        ("sequence packing", "frozen parameters", "activation checkpointing"),
        {
            **TRAINING,
            "model": {"build": "user_models:frozen", "args": {**SIZES, "layers": layers, "tie_embeddings": False}},
            "data": {"source": [{"jsonl": "documents.jsonl"}], "document_masking": True, "packing": "whole"},
            "memory": {"activation_checkpointing": "full"},
        },
    )


MIXTURE = {
    "layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_experts": 4,
    "dense_layers": 1,
    "shared_expert_hidden_size": 16,
}
EXPERTS = Case(
    "experts",
    ("accumulation", "clipping", "tied embeddings"),
    {
        **TRAINING,
        "model": {"build": "phalanx.models:moe", "args": MIXTURE},
        "optimizer": {**TRAINING["optimizer"], "max_grad_norm": 0.5},
    },
)
PACKED_EXPERTS = Case(
    "packed-experts",
    ("sequence packing", "frozen parameters", "activation checkpointing"),
    {
        **second(2).changes,
        "model": {"build": "user_models:frozen_experts", "args": {**MIXTURE, "tie_embeddings": False}},
    },
)
MIXTURES = (EXPERTS, PACKED_EXPERTS)
DENSE, DEEP = (first(2), second(2)), (first(4), second(4))
FIRST = DENSE[0]
MOVED = "checkpoint read under another parallelism"
FEATURES = (*DENSE[0].features, *DENSE[1].features, MOVED)


@dataclass(frozen=True)
class Layout:
    """A layout, the cases that are run under it, and the layout under which its checkpoint is read and written anew."""

    values: Values
    cases: tuple[Case, ...] = DENSE
    moved_to: Values = field(default_factory=lambda: {"replicate": 1})

    @property
    def workers(self) -> int:
        product = 1
        for name in ("replicate", "shard", "tensor", "pipeline", "context"):
            product *= self.values.get(name, 1)
        return product

    @property
    def batch(self) -> Values:
        """As few micro-batches as accumulate, or fill a pipeline: what costs time here is how often workers wait for
        each other."""
        whole, groups = TRAINING["batch"]["global_size"], self.values.get("replicate", 1) * self.values.get("shard", 1)
        count = 4 if "pipeline" in self.values else 2
        return {"global_size": whole, "micro_size": whole // groups // count}

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in self.values.items() if isinstance(size, int) and name != "async_tp"]
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
    Layout({"pipeline": 2, "pipeline_schedule": "gpipe", "layers_per_stage": [1, 3]}, DEEP, {"shard": 2}),
    Layout({"pipeline": 2, "pipeline_schedule": "interleaved"}, DEEP, {"shard": 2}),
    Layout({"pipeline": 2, "pipeline_schedule": "zero-bubble"}, DEEP, {"tensor": 2}),
    Layout({"shard": 2, "expert": 2}, MIXTURES, {"shard": 2}),
    Layout({"shard": 4}, moved_to={"shard": 2, "tensor": 2}),
    Layout({"context": 4}),
    Layout({"pipeline": 4}, DEEP, {"pipeline": 2}),
    Layout({"replicate": 2, "shard": 2}, moved_to={"tensor": 2}),
    Layout({"replicate": 2, "tensor": 2}, moved_to={"shard": 4}),
    Layout({"replicate": 2, "pipeline": 2}),
    Layout({"shard": 2, "tensor": 2}, moved_to={"pipeline": 2}),
    Layout({"shard": 2, "pipeline": 2}, moved_to={"tensor": 2}),
    Layout({"shard": 2, "context": 2}, moved_to={"shard": 2}),
    Layout({"tensor": 2, "context": 2}, moved_to={"replicate": 2}),
    Layout({"tensor": 2, "pipeline": 2}, moved_to={"shard": 2}),
    Layout({"context": 2, "pipeline": 2}, moved_to={"shard": 2}),
    Layout({"shard": 4, "expert": 2}, MIXTURES, {"shard": 2, "expert": 2}),
    Layout({"shard": 2, "tensor": 2, "expert": 2}, MIXTURES),
    Layout({"context": 2, "pipeline": 2, "expert": 2}, MIXTURES, {"shard": 2}),
    Layout({"replicate": 2, "shard": 2, "tensor": 2}, DENSE, {"shard": 2}),
    Layout({"replicate": 2, "shard": 2, "context": 2}, DENSE, {"shard": 2}),
    Layout({"shard": 2, "tensor": 2, "pipeline": 2}, moved_to={"replicate": 2}),
    Layout({"shard": 2, "tensor": 2, "context": 2}, DENSE, {"tensor": 2}),
    Layout({"replicate": 2, "shard": 2, "tensor": 2, "expert": 2}, MIXTURES, {"shard": 4, "expert": 4}),
)


def table() -> str:
    """Layouts x features, in Markdown: what is tested, cell by cell."""
    lines = ["| workers | parallelism | " + " | ".join(FEATURES) + " |", "|---:|---|" + ":-:|" * len(FEATURES)]
    for layout in sorted(LAYOUTS, key=lambda layout: layout.workers):
        tested = {feature for case in layout.cases for feature in case.features} | {MOVED}
        cells = " | ".join("yes" if feature in tested else "" for feature in FEATURES)
        lines.append(f"| {layout.workers} | {layout} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
