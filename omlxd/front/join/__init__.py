"""`omlxd join`: this machine has a share of a model that another one serves (engine/server/ranks/).

It waits for a paired lead, starts a rank for it, carries the bytes between both, and gives the rank room on
this machine's SSD. No HTTP, and no model of its own.
"""
