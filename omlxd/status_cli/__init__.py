"""`omlxd status`, `omlxd top` and `omlxd config`: what the running daemon does, and with what settings.

What belongs here: asking the daemon, and tables. What may not: MLX, a model, the cache dir's files.
"""
