"""mlx-lm's cache classes: what each keeps, how rows are batched, shared, packed and written to a file."""
