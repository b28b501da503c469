"""Turns a conversation into token ids, always the same. Rule: no MLX, and nothing of the scheduler."""
