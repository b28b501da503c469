"""What the SSD cache holds, as a table and as a tree of conversations."""
