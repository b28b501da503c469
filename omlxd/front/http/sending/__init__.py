"""Sends answers: events, streams, WebSockets, and readers that are too slow."""
