"""What a request leaves behind: its trace, its metrics, the last hour."""
