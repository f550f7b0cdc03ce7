"""From an `nn.Module` to its `ModelProfile`, without memory and without time; see trace_model.py."""
