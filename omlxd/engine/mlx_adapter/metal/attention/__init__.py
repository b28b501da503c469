"""Attention of a batch's rows on Metal: each reads its KV where it lies, and what rows share is read once."""
