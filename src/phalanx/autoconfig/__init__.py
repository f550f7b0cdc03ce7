"""Turn every `auto` of a recipe into a value: prediction first, then short trials."""
