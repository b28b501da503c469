"""Requests that wait, and who of them goes first."""
