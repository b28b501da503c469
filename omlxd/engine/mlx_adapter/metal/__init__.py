"""Metal: kernels of omlxd's own for Apple's GPUs, each behind one rule (rule.py).

Rule: `kernel.py` is the one file that calls a kernel; a kernel is used only where `rule.judged` said so. No
kernel of this folder has run on a Mac.
"""
