"""What tools/soak.py is made of: the daemon, its traffic, its troubles, and what grew or was left."""
