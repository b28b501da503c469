"""The engine's hand on the disk: read blocks, write them in the background, stop when the disk fails.

Rule: every byte written was reserved first; nothing here touches the block pool.
"""
