"""Responses and threads that clients may name again."""
