"""`omlxd cache`: looks at, verifies and clears a cache dir, with or without a daemon on it.

Rule: no MLX, no model, no event loop. What changes the folder while a daemon holds it, that daemon does
(holder.py).
"""
