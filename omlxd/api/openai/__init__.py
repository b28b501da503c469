"""OpenAI's Chat Completions and Completions APIs. Rule: nothing here imports api/anthropic/."""
