"""CUDA alone: kernels and compiled decode steps."""
