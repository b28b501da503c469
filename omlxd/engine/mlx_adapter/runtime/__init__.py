"""The device, arrays and their memory, weights mapped from files, and lean imports of transformers."""
