"""Every verb of the `omlxd` command. Rule: no verb imports front/, the engine or MLX; main.py starts the
front.
"""
