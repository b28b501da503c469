"""`omlxd config` and `omlxd key`."""
