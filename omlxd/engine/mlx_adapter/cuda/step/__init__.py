"""Decode steps on CUDA: compiled once a shape, or fused into few kernels."""
