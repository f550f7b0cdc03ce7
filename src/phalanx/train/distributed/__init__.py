"""Layouts: how one model and one batch are divided over many workers, for any `nn.Module`."""
