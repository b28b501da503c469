"""What any program has: units, atomic files, bounded maps, private traces, keys.

Rule: common/ imports nothing of omlxd.
"""
