"""A request's life over HTTP: accepted, queued, answered, recorded.

Rule: http/ knows engines by front/engines/protocol.py alone, and protocols by api/.
"""
