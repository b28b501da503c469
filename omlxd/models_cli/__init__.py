"""`omlxd models`: what is installed and loaded, and the owner's say in it.

Asks the running daemon; `list`, `show` and `pull` work without one. Imports neither MLX nor the hub.
"""
