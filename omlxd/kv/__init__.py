"""The KV store: blocks by name in RAM and on SSD, prefix matching, and what leaves first.

Rule: kv/ imports common/ alone: no MLX, no model, no request of a protocol, no event loop.
"""
