"""`omlxd models` and `omlxd tune`."""
