"""Reads tool calls in the text that a model writes. Rule: knows text, tools and formats, and no tokens."""
