"""How many bytes lie on disk, whose turn it is to go, and what may be written today.

Rule: the ledger counts and chooses; it imports kv/files/ alone and reads no block's contents.
"""
