"""`omlxd doctor`: what of this machine and these settings would keep omlxd from working well.

What belongs here: one check a function, each a `Finding` with its mend. What may not: MLX in this
process, changes to anything; the one file that is written, to time the disk, is removed again.
"""
