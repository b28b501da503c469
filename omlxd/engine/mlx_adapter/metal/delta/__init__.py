"""Gated delta net on Metal: a decode step in one launch, and prompts by MLX's own chunks."""
