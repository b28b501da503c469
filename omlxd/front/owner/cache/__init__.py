"""The owner's API of the SSD cache: trees, pins, export and import, reasons for misses."""
