"""CUDA source to machine code, what is kept of it on disk, and the driver."""
