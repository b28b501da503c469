"""Checks and verifies the files of the SSD cache."""
