"""HTTP protocols, one a file: a translation into `chat.GenerateRequest` and out of `chat.Event`.

Sans-I/O: bytes and structs in, bytes and structs out. What may not come in: models, engines, sockets.
"""
