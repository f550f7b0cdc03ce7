"""Names that torch does not promise to keep."""

import logging
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from phalanx import compat


def test_fp8_products_are_computed_by_what_each_torch_can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: asked.append("private") or args[0])
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *args, **kwargs: asked.append("public") or args[0])
    one = torch.ones(())
    for version, expected in (((2, 11), "private"), ((2, 13), "public")):
        monkeypatch.setattr(compat, "torch_version", lambda version=version: version)
        compat.scaled_mm(one, one, one, one, torch.bfloat16)
        assert asked.pop() == expected


def test_deterministic_kernels_are_strict_and_fill_no_memory() -> None:
    try:
        compat.set_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        compat.set_deterministic(False)


def test_an_operation_without_a_deterministic_kernel_is_known_by_torchs_words() -> None:
    words = "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_deterministic"
    assert compat.find_nondeterministic_op(RuntimeError(words)) == "cumsum_cuda_kernel"
    assert compat.find_nondeterministic_op(RuntimeError("out of memory")) is None


def test_a_causal_bias_is_made_where_operations_are_watched() -> None:
    query, key = torch.randn(2, 1, 1, 3, 8, generator=torch.Generator().manual_seed(1)).split(1)
    longer = torch.cat([key[0], key[0] + 1], dim=2)
    mask = torch.ones(3, 6, dtype=torch.bool).tril(3)
    expected = scaled_dot_product_attention(query[0], longer, longer, attn_mask=mask)
    with compat.observe_operations(lambda result: None):
        found = scaled_dot_product_attention(query[0], longer, longer, attn_mask=compat.causal_lower_right(3, 6))
    assert torch.allclose(found, expected)


LATE = """
import os, sys, time
from phalanx.process_lifetime import die_with_parent
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
die_with_parent(parent)
open(sys.argv[1], "w")
"""


def test_a_child_whose_parent_died_before_it_asked_to_die_with_it_dies_at_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LATE, str(tmp_path / "lived")], capture_output=True, check=True, timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_a_c_compiler_and_pythons_headers_are_looked_for_as_triton_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not compat.has_compiler()
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    assert compat.has_compiler()
    (tmp_path / "gcc").unlink()
    monkeypatch.setenv("CC", "icx")
    assert compat.has_compiler()
    (tmp_path / "Python.h").unlink()
    assert not compat.has_compiler()


def test_torch_logs_nothing_of_an_operation_that_fails_on_fake_tensors() -> None:
    logged: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = logged.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with compat.fake_tensor_mode(), pytest.raises(RuntimeError, match="storage"):
            torch.empty(2).set_(torch.UntypedStorage(8))
    finally:
        log.removeHandler(handler)
    assert not logged
    assert not log.disabled
