"""HTTP protocols, a room each: translation into `chat.GenerateRequest` and out of `chat.Event`.

Rule: sans I/O: bytes and structs in, bytes and structs out; no model, no engine, no socket.
"""
