"""What a block, a record and a namespace look like on disk.

Rule: files are read and written here by path; nothing here decides which files stay.
"""
