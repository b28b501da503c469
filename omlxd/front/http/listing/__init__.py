"""Lists models, and answers clients that look which server this is."""
