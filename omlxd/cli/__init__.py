"""Every verb of the `omlxd` command.

Rule: no verb imports front/, the engine or MLX; cli/main.py alone starts the front, late.
"""
