"""`omlxd doctor --report`: one text about this machine, to paste into an issue.

Rule: each line is made by itself, within a time of its own, and says what failed; no MLX in this process;
whatever is printed goes through `privacy.py`.
"""
