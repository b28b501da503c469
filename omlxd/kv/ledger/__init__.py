"""The account of bytes on disk, their eviction order, and the day's write budget.

Rule: the ledger counts and chooses; it imports kv/files/ alone and reads no block's contents.
"""
