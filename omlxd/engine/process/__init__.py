"""What an engine process sets up for itself: its BLAS and its child processes."""
