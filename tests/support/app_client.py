"""Requests to an app without a socket, and what an error must look like."""

import httpx

BASE = "http://127.0.0.1:8000"
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages"]


def body(path: str, **more):
    prompt = (
        {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    return {"model": "tiny", "max_tokens": 5, **prompt, **more}


def client(app, **more) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=BASE, **more)


def message_of(path: str, answer) -> str:
    given = answer.json()
    if path.startswith("/v1/messages"):
        assert given["type"] == "error" and given["request_id"].startswith("req_")
        assert answer.headers["request-id"] == given["request_id"]
    else:
        assert set(given) == {"error"} and set(given["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
    return given["error"]["message"]
