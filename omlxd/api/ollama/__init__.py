"""Ollama's chat and generate, as `ollama`'s own clients speak them."""
