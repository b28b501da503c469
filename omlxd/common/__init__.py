"""What any program has: units, atomic files, bounded maps, private traces.

Rule: common/ imports nothing of omlxd.
"""
