"""One request as the engine works on it, and how its next token is drawn."""
