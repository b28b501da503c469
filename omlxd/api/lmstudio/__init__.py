"""LM Studio's own REST API, version 1: chats whose turns are kept here."""
