"""A profile of a few steps."""

import json
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.train.profiler import OP_KINDS, OTHER_OP_KIND, classify_op, profile_steps
from phalanx.train.step_timer import STEP_PHASES
from small_train import make_parts


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
        ("aten::add_", OTHER_OP_KIND),
    ],
)
def test_operations_are_sorted_into_kinds_by_name(name: str, kind: str) -> None:
    assert classify_op(name) == kind


def test_a_trace_tells_means_of_a_step_by_part_and_kind(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    found = profile_steps(parts, steps=2, warm_up=1, trace_path=tmp_path / "trace.json")
    assert found.steps == 2
    assert set(found.breakdown_s) == set(STEP_PHASES)
    assert found.step_s == pytest.approx(sum(found.breakdown_s.values()))
    assert set(found.kinds_s) <= {*OP_KINDS, OTHER_OP_KIND}
    assert 0 < found.kinds_s["matmul"] < found.step_s
    seconds = [own for _, own, _ in found.ops]
    assert seconds == sorted(seconds, reverse=True)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_trace_is_written_to_a_device_and_a_full_disk_is_said(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    with pytest.raises(UsageError, match=r"the trace cannot be written: /dev/full: No space left on device"):
        profile_steps(parts, steps=1, warm_up=0, trace_path=Path("/dev/full"))
    assert Path("/dev/full").is_char_device()
