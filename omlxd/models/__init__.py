"""Where models come from: hub or folder, the default model, and the demo model."""
