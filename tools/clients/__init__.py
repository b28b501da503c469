"""Real clients of omlxd, one a file: how each is installed, what it is told, how it is run."""
