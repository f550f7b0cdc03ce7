"""Heat: thermal models by kind of accelerator, nodes that run hot, and the cooling plant."""
