"""`python -m omlxd.engine.server.measure JOB PART…`: measures MLX and the engine for `omlxd doctor --report`.

Rule: a part is a function that returns a `Measured`; nothing of it names a file, a user or a prompt.
"""
