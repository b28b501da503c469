"""GGUF files: read safely, and turned into model folders that MLX loads. NumPy only, no MLX."""
