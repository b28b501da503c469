"""HTTP protocols, a room each, sans I/O: bytes ↔ `chat` structs; no model, no engine, no socket."""
