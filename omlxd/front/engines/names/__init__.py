"""Names of models: those that clients use, and those that the owner gave."""
