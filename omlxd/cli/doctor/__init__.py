"""`omlxd doctor`: what of this machine and these settings keeps omlxd from working well.

Rule: one check a function, each a `Finding`; no MLX in this process; nothing is changed.
"""
