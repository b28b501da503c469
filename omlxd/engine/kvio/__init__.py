"""KV between the model's arrays and the store: match, restore, offer, checkpoint.

Rule: kvio/ moves KV and decides nothing about the order of requests; it imports kv/ and mlx_adapter/.
"""
