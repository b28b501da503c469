"""OpenAI's Chat Completions and Completions APIs, and the fields that local clients add.

Rule: *_request reads a body into `chat`, *_answer writes `chat` events; nothing here imports api/anthropic/.
"""
