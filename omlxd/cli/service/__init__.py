"""`omlxd service`: the daemon as a service of the user, under launchd or systemd."""
