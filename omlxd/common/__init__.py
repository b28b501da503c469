"""Tools of any program: units, atomic files, bounded maps, child processes, private traces.

Rule: common/ imports nothing of omlxd.
"""
