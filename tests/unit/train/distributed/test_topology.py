"""What workers say to one another: values as JSON, and nothing else that a peer may send is believed."""

import pytest
import torch
import torch.distributed as dist

from phalanx.train.distributed import object_collectives
from phalanx.train.distributed.object_collectives import format_dtype, parse_dtype


@pytest.mark.parametrize("said", [b"\x80\x04K\x01.", b"", b"[" * 100_000, b"\xff", b"{'a': 1}"])
def test_what_is_no_json_ends_the_attempt_as_a_lost_worker_does(said: bytes) -> None:
    with pytest.raises(dist.DistError, match="is not JSON"):
        object_collectives._decode_json(
            torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0, dtype=torch.uint8)
        )


@pytest.mark.parametrize("size", [-1, 0, object_collectives.MAX_JSON_BYTES + 1, 1 << 62])
def test_a_size_without_bounds_is_not_allocated(size: int) -> None:
    with pytest.raises(dist.DistError, match="bytes, expected 1 to"):
        object_collectives._check_json_size(size)


def test_a_dtype_goes_as_its_name_and_nothing_else_of_torch_is_one() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool):
        assert parse_dtype(format_dtype(dtype)) is dtype
    for name in ("load", "nn", "__class__", "float32.__class__", ""):
        with pytest.raises(dist.DistError, match="instead of a dtype"):
            parse_dtype(name)
