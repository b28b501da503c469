"""What all protocols' answers share: formats, thinking and session fields, server-sent events."""
