"""The KV store: block pool, block tables, chain hashes, hot tier, cold tier.

What belongs here: everything about blocks and their bytes. What may not: MLX, a model, a
request's protocol, an event loop. This room imports nothing of the other rooms.
"""
