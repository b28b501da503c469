"""Draft tokens: who proposes them, how many, and which of them the model accepts."""
