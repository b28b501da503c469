"""`omlxd peer`: which other omlxd may read this machine's SSD cache, and whose this one reads."""
