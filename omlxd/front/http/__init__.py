"""A request's life over HTTP: accepted, queued, answered, recorded.

Rule: http/ asks a `ModelEngine` and the `EnginePool`, and knows no process; it knows protocols by api/.
"""
