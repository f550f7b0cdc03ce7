"""A profile of a few steps."""

import json
from pathlib import Path

import pytest
from small_train import make_parts

from phalanx.train.timing import PARTS
from phalanx.train.trace import KINDS, OTHER, kind_of, trace


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::bmm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::mkldnn_convolution", "convolution"),
        ("aten::native_layer_norm", "normalisation"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_log_softmax", "loss"),
        ("aten::embedding_dense_backward", "embedding"),
        ("gloo:all_reduce", "communication"),
        ("aten::copy_", "copies and casts"),
        ("aten::add_", OTHER),
    ],
)
def test_operations_are_sorted_into_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_tells_means_of_a_step_by_part_and_kind(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    found = trace(parts, parts.objective, steps=2, warm_up=1, out=tmp_path / "trace.json")
    assert found.steps == 2
    assert set(found.parts) == set(PARTS)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert set(found.kinds) <= {*KINDS, OTHER}
    assert 0 < found.kinds["matmul"] < found.seconds
    seconds = [own for _, own, _ in found.operations]
    assert seconds == sorted(seconds, reverse=True)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
