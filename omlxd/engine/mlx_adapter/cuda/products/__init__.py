"""Kernels of products on CUDA, and of a layer's products in one launch."""
