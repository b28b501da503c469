"""Images and PDFs of a prompt, from encoded bytes to what a model reads.

Rule: clients' bytes are decoded in a child process alone (media_child.py), which has no MLX; no URL is
fetched.
"""
