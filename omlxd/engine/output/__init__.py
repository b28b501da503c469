"""Turns token ids into events. Rule: output/ reads sequences; it imports neither schedule/ nor kvio/."""
