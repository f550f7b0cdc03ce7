"""When tensors of a segment are alive, and what a model keeps for backward."""

import torch
from torch import nn

from phalanx.planner.trace.to_segments import AccessTrace, fuse_groups
from phalanx.planner.trace.trace_model import build_on_meta, image_classification_forward, profile_model

# Forward: operation 0 makes 10 of what enters, 1 makes 11 of 10, 2 makes 12 of 11. Backward: 3 reads 11, makes 13; 4
# reads 13 and 10, makes 14, which leaves.
MADE = {10: 0, 11: 1, 12: 2, 13: 3, 14: 4}
TOUCHED = {10: [1, 4], 11: [2, 3], 13: [4]}


def trail(**sizes: float) -> AccessTrace:
    """With the sizes of some, the others of one byte."""
    found = {key: (sizes.get(f"of_{key}", 1.0), key == 11) for key in MADE}
    return AccessTrace(found, MADE, TOUCHED, first_backward=3, num_ops=5)


def test_what_one_operation_of_a_group_hands_to_the_next_is_never_stored() -> None:
    together = fuse_groups(trail(), groups=[[0, 1, 2], [3, 4]], saved=[10])
    assert set(together.storage_sizes) == {10, 12, 14}
    # 11 is made again from 10 when backward reads it, which keeps 10 alive until then.
    assert max(together.readers[10]) == 4


def test_a_long_chain_of_operations_that_read_two_tensors_each_is_followed_at_once() -> None:
    length = 200
    made = {key: key for key in range(length)}
    touched = {key: [key + 1, key + 2] for key in range(length - 2)} | {length - 2: [length - 1]}
    long = AccessTrace(dict.fromkeys(made, (1.0, False)), made, touched, first_backward=length, num_ops=length)
    together = fuse_groups(long, groups=[range(length)], saved=[])
    assert set(together.storage_sizes) == {length - 1}
    assert sum(map(len, together.readers.values())) <= length * length


def test_what_two_segments_share_is_kept_once() -> None:
    def make() -> nn.Module:
        blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(3)))
        return nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    found = profile_model(build_on_meta(make, torch.float32), image_classification_forward(3, 8, 8), 1)
    kept = sum(each.repeats * each.saved.replicated.per_sample for each in found.segments)
    image, activation, loss = 4 * 3 * 64, 4 * 16 * 64, 4 * 16 + 8
    assert kept == image + 4 * activation + loss  # the result of each ReLU, which the next convolution reads
