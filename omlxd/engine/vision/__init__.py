"""Images and PDFs of a prompt, from encoded bytes to a model's input.

Rule: clients' bytes are decoded in a child process alone (media_child.py), which has no MLX; no URL is
fetched.
"""
