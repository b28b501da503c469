"""Which sequence computes what next: queue, prefill budget, decode batch, sampling.

Rule: schedule/ runs on the thread that owns MLX and never waits for a disk or a client.
"""
