"""The front process: HTTP, engine supervision, the cold tier's ledger.

What may not come in: MLX, transformers, numpy. It starts in under half a second, stays under
60 MB, and never dies of a model's fault.
"""
