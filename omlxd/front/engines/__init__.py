"""Engine processes: start and watch them, share memory and disk among them.

Rule: engines/ knows nothing of HTTP; it speaks wire/ with its engines.
"""
