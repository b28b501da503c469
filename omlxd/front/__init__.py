"""The front process: HTTP, engine processes, and the disk and memory that they share.

Rule: front/ never imports the engine, MLX, numpy or transformers; it outlives any fault of a model.
"""
