"""Recognises the program that sent a request or wrote a prompt, and the words of its user."""

from __future__ import annotations

import re

_PROMPTS = [
    (name, re.compile(pattern))
    for name, pattern in (
        ("Claude Code", r"Claude Code|Claude Agent SDK|x-anthropic-billing-header"),
        ("Codex", r"\bCodex\b"),
        ("opencode", r"\bopencode\b"),
        ("Qwen Code", r"\bQwen Code\b"),
        ("Gemini CLI", r"\bGemini CLI\b|interactive CLI agent"),
        ("Copilot", r"\bGitHub Copilot\b"),
        ("Cline", r"You are (?:Cline|Roo)\b"),
        ("Continue", r"<important_rules>\s+You are in (?:agent|chat|plan) mode"),
        ("Crush", r"You are Crush\b"),
        ("goose", r"agent called goose\b"),
        ("aider", r"SEARCH/REPLACE block"),
        ("Cursor", r"operat\w+ in Cursor\b"),
    )
]
"""Programs, and what identifies the system prompt of each."""

_AGENTS = {
    "claude-cli": "Claude Code",
    "claude-code": "Claude Code",
    "codex": "Codex",
    "opencode": "opencode",
    "geminicli": "Gemini CLI",
    "qwencode": "Qwen Code",
    "cline": "Cline",
    "continue": "Continue",
    "zed": "Zed",
    "crush": "Crush",
    "goose": "goose",
    "litellm": "LiteLLM",
    "openai/python": "OpenAI SDK",
    "openai/js": "OpenAI SDK",
    "asyncopenai": "OpenAI SDK",
    "anthropic/": "Anthropic SDK",
    "ollama": "Ollama client",
    "mozilla": "Browser",
    "python-urllib": "Python",
    "python-httpx": "Python",
    "curl": "curl",
}
"""Beginnings of User-Agents, and the programs that send them."""

PAGE_SESSION = "page-"
"""How the session ids of the daemon's own page begin."""
MOST_CLIENT = 40

_NOTES = re.compile(
    r"<(system-reminder|environment_context|user_instructions|INSTRUCTIONS|environment_details|context|env)\b[^>]*>"
    r".*?(?:</\1>|\Z)",
    re.DOTALL,
)


_TITLE = re.compile(
    r"(?=.*\b(?:conversation|chat|session|thread|task|topic)).*"
    r"(?:\btitle generator|\b(?:generat|creat|craft|provid|writ|extract|suggest)\w*\b[^.\n]{0,80}?"
    r"\b(?:titles?|broad tags|follow-up questions)\b)",
    re.DOTALL | re.IGNORECASE,
)
TITLE_CHARS = 400


def asks_for_title(text: str) -> bool:
    """Return whether `text`, a system's or a user's, begins as clients do that want a conversation's title,
    tags or next questions: Claude Code, Codex, opencode, Copilot, Crush, Zed, Open WebUI."""
    return _TITLE.match(text[:TITLE_CHARS]) is not None


def client_of_prompt(text: str) -> str:
    """Return the program whose system prompt begins `text`; "" if unknown."""
    return next((name for name, pattern in _PROMPTS if pattern.search(text)), "")


def client_of_request(user_agent: str, session: str = "") -> str:
    """Return the program that sent a request, by its users' name; "" where it does not say."""
    if session.startswith(PAGE_SESSION):
        return "This page"
    if own := re.match(r"omlxd-([a-z]{1,20})/", user_agent):
        return f"omlxd {own[1]}"
    agent = user_agent.strip().lower()
    known = next((name for start, name in _AGENTS.items() if agent.startswith(start)), "")
    return known or re.split(r"[/ (]", user_agent.strip(), maxsplit=1)[0][:MOST_CLIENT]


def own_words(text: str) -> str:
    """Return a user's `text` without the notes that clients write into it."""
    return _NOTES.sub("", text).strip() if "<" in text else text.strip()
