"""Parallelism: divide one model and one batch over many workers, for any `nn.Module`."""
