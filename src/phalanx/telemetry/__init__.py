"""Read power, heat, load and errors of nodes and their accelerators, once a second."""
