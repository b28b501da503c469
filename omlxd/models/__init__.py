"""Where models come from: hub or folder, and the embedded demo model."""
