"""Kernels of attention on CUDA, and what says when each runs."""
