"""`omlxd service`: the daemon under launchd or systemd, as a service of the user.

plan.py says what is to run, manager.py what a service manager must be able to do, launchd.py and
systemd.py how each does it, command.py what the user sees. Nothing here talks to the daemon.
"""
