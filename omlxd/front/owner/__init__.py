"""Pages for the machine's owner: status, models, cache, metrics.

Rule: owner/ reads figures and forwards the owner's orders; no request passes through it.
"""
