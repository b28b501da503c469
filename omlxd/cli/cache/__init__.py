"""`omlxd cache`: looks at, verifies and clears a cache dir, with or without a daemon on it.

Rule: no MLX, no model, no event loop. The daemon that holds the folder changes it (holder.py).
"""
