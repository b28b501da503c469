"""Chat templates: messages for them, their features, and the processes that render them."""
