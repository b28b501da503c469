"""`omlxd mcp`: a server of the Model Context Protocol, by which an agent manages a daemon's models."""
