"""`omlxd status`, `top` and `memory`: what the running daemon does."""
