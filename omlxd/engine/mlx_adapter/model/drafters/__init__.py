"""Drafters that read their target's hidden states: their folders, one interface, a model's own heads."""
