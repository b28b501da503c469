"""The engine process: one loaded model, and one thread that owns MLX.

Rule: only engine/ imports MLX, and only engine/mlx_adapter/ knows mlx-lm; no HTTP and no protocol comes in.
"""
