"""How a verb reaches the daemon: its HTTP client, its owner's API, and a daemon of the verb's own."""
