"""Carries conversations of the cache to files and back."""
