"""How a forward pass reads keys and values: the hook into mlx-lm's attention, and attention row by row."""
