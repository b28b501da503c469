"""Batches on CUDA whose rows keep arrays of their own, told by address."""
