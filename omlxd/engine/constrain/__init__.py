"""Grammars, schemas and forced tool calls as token masks. Rule: no MLX; what can't be enforced is refused."""
