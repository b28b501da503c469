"""JSON schemas: their faults, their branches, and what of them can be enforced."""
