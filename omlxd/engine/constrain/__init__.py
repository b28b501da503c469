"""Grammars, schemas, forced tool calls and ends of thoughts as token masks; endless loops.

Rule: no MLX; what can't be enforced is refused.
"""
