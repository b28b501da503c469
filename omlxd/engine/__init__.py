"""The engine process: one loaded model, one thread that owns MLX.

What belongs here: prompt pipeline, scheduling, harvest and restore of KV, sampling, output
parsing. `mlx_adapter/` alone touches mlx-lm's internals. What may not: HTTP, protocols.
"""
