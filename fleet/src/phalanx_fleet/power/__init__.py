"""Power caps of devices that keep every level of a tree of budgets within its budget."""
