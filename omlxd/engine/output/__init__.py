"""From token ids to events. Rule: output/ reads sequences; it imports neither schedule/ nor kvio/."""
