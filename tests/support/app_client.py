"""Requests to an app without a socket, and what an error must look like."""

import httpx

BASE = "http://127.0.0.1:8000"
UNPREFIXED = ["/chat/completions", "/completions", "/completion", "/embeddings"]
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages"]
DOORS = [
    *PATHS,
    "/v1/responses",
    "/v1/responses/compact",
    "/api/chat",
    "/api/generate",
    "/api/v1/chat",
    "/api/show",
    "/api/pull",
    "/models/load",
    *UNPREFIXED[:3],
    "/v1beta/models/tiny:generateContent",
    "/v1/models/org/tiny:countTokens",
]
EMBEDDING = [
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/api/embed",
    "/api/embeddings",
    "/embeddings",
]
DOORS += EMBEDDING
"""Paths that take a body, all of them."""
PAGES = ["/v1/models", "/models", "/props", "/api/tags", "/api/ps", "/api/version", "/api/v0/models"]
PAGES += ["/api/v1/models", "/v1beta/models", "/v1/codex/models"]
"""Paths that only tell of models."""


def body(path: str, **more):
    prompts = {
        **{key: {"prompt": "hi"} for key in ["/v1/completions", "/completions", "/completion"]},
        "/embeddings": {"input": "hi"},
        "/api/generate": {"prompt": "hi"},
    }
    prompts |= {
        key: {"input": "hi"}
        for key in ["/v1/responses", "/v1/responses/compact", "/api/v1/chat", "/v1/embeddings", "/api/embed"]
    }
    prompts |= {key: {"query": "q", "documents": ["d"]} for key in ["/v1/rerank", "/v2/rerank", "/rerank"]}
    prompts["/api/embeddings"] = {"prompt": "hi"}
    if "/models/" in path and ":" in path:
        prompts[path] = {"contents": [{"parts": [{"text": "hi"}]}]}
    prompt = prompts.get(path, {"messages": [{"role": "user", "content": "hi"}]})
    return {"model": "tiny", "max_tokens": 5, **prompt, **more}


def client(app, **more) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=BASE, **more)


def message_of(path: str, answer) -> str:
    given = answer.json()
    if path.startswith("/v1/messages"):
        assert given["type"] == "error" and given["request_id"].startswith("req_")
        assert answer.headers["request-id"] == given["request_id"]
    elif path.startswith("/api/") and not path.startswith(("/api/v0", "/api/v1")):
        assert set(given) == {"error"} and answer.headers["x-request-id"].startswith("req_")
        return given["error"]
    elif path.startswith("/v1beta") or path.endswith(("Content", "countTokens")):
        assert set(given) == {"error"} and set(given["error"]) == {"code", "message", "status", "details"}
        assert given["error"]["code"] == answer.status_code
    else:
        assert set(given) == {"error"} and set(given["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
    return given["error"]["message"]
