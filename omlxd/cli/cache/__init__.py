"""`omlxd cache`: look at, verify and clear a cache dir, with or without a daemon on it.

What belongs here: the verbs, and what they need to know of files. What may not: MLX, a model, an
event loop. Verbs that only look never take the daemon's lock; what changes the folder while a daemon
holds it is done by that daemon (cli/cache/holder.py).
"""
