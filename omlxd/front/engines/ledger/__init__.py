"""The SSD cache's ledger and its pins, worked by one thread."""
