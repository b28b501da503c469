"""`omlxd chat` and `omlxd run`."""
