"""What any program has: units, atomic files, bounded maps, child processes, private traces.

Rule: common/ imports nothing of omlxd.
"""
