"""omlxd: a daemon that serves local language models through MLX and never computes the same prefix twice.

This package holds three programs' worth of code, in rooms whose dependencies point one way:
`api → chat`, `front → api, chat, kv.ledger`, `engine → kv, chat`. Only `engine` may import MLX.
"""

__version__ = "0.1.0"
