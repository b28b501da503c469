"""Decisions: typed questions about a state or an input, answered by probabilities of given options."""
