"""Several processes that share one model: rank 0 decides and samples, the others make the same calls on KV of
their own; on this machine, and on others that run `omlxd join` (joined.py).

No rule of scheduling and no format of files belongs here.
"""
