"""What two omlxd of one owner say to each other: pairing, blocks of the SSD cache, read-only, and whether one
has a share of the other's model.

Rule: peer/ imports common/ and the files of kv/ alone: no MLX, no HTTP, no event loop. The front listens
(server.py, front/join/), engines ask (client.py), `omlxd peer` pairs.
"""
