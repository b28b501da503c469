"""Finds models: hub or folder, the default model, and the demo model."""
