"""From a conversation to token ids.

Rule: nothing here imports MLX or knows of the scheduler; the same conversation gives the same tokens.
"""
