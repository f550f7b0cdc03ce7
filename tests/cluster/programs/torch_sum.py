"""Sums over all processes with PyTorch."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
print(f"sum {int(value.item())} of {dist.get_world_size()}")
dist.destroy_process_group()
