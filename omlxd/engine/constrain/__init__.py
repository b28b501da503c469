"""What the model may say next: grammars, schemas and forced tool calls as token masks.

Rule: nothing here imports MLX; a grammar that cannot be enforced is refused by name.
"""
