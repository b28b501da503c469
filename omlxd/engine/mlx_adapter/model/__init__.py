"""Models: load, adapters, vision, embeddings, MTP heads, training, perplexity and inspection."""
