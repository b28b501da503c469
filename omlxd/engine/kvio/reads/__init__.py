"""Read cached prefixes into sequences' caches, or compute them where that is faster."""
