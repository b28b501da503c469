"""LoRA adapters: rows of a batch that have them, and training."""
