"""`omlxd engine`: JSON Lines on standard input and output, for programs that embed an engine.

A translation and nothing more: bodies are read by the `api` room, engines and the SSD cache are the front's.
As the front, it never imports the engine, MLX, numpy or transformers.
"""
