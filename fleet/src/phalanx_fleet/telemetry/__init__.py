"""Read racks, coolant distribution units and management controllers of nodes."""
