"""Formats on disk of a block, a record and a namespace.

Rule: files are read and written here by path; nothing here decides which files stay.
"""
