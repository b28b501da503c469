"""From token ids to events: text, reasoning, tool calls and log probabilities.

Rule: output/ reads sequences and never computes; it imports neither schedule/ nor kvio/.
"""
