"""What two omlxd of one owner say to each other: pairing, and blocks of the SSD cache, read-only.

Rule: peer/ imports common/ and the files of kv/ alone: no MLX, no HTTP, no event loop. The front listens
(server.py), engines ask (client.py), `omlxd peer` pairs.
"""
