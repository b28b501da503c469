"""Anthropic's Messages API. Rule: request.py reads a body into `chat`, answer.py writes `chat` events."""
