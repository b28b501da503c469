"""Clients that check every answer."""

from __future__ import annotations

import json
import random
import threading
import time

import httpx

from .own_daemon import MODELS, Daemon
from .report import Report


class Client(threading.Thread):
    """Asks, checks the answer, asks again; its conversation grows for a while, then begins anew."""

    def __init__(self, daemon: Daemon, seed: int, report: Report, stop: threading.Event):
        super().__init__(daemon=True)
        self._daemon_ = daemon
        self._random = random.Random(seed)
        self._report = report
        self._stopping = stop
        self._turns: list[dict[str, str]] = []

    def run(self) -> None:
        with httpx.Client(
            base_url=self._daemon_.url, timeout=self._daemon_.answer_s, trust_env=False
        ) as http:
            while not self._stopping.is_set():
                path, content = self._request()
                try:
                    outcome = self._ask(http, path, content)
                except Exception as error:
                    if self._stopping.is_set():
                        return
                    outcome = f"no answer: {type(error).__name__}"
                    self._report.improper.append(f"{path} {type(error).__name__}: {error}")
                self._report.answers[outcome] += 1
                if outcome.startswith("retry"):
                    time.sleep(0.3)

    def _request(self) -> tuple[str, dict[str, object]]:
        chance = self._random
        if len(self._turns) > 12:
            self._turns = []
        words = " ".join(
            chance.choice(("kettle", "saucer", "spoon", "cup")) for _ in range(chance.randint(5, 300))
        )
        path = chance.choice(("/v1/messages", "/v1/chat/completions", "/v1/completions"))
        content: dict[str, object] = {
            "model": chance.choice((*MODELS, MODELS[0], "claude-sonnet-4-5")),
            "max_tokens": chance.choice((1, 8, 40)),
            "stream": chance.random() < 0.6,
            "temperature": 0,
        }
        if path == "/v1/completions":
            content["prompt"] = words
        else:
            self._turns.append({"role": "user", "content": words})
            content["messages"] = list(self._turns)
            self._turns.append({"role": "assistant", "content": "yes"})
        if chance.random() < 0.03:
            content["keep_alive"] = 0
        return path, content

    def _ask(self, http: httpx.Client, path: str, content: dict[str, object]) -> str:
        leaves = self._random.random() < 0.1
        with http.stream("POST", path, json=content) as answer:
            if answer.status_code != 200:
                answer.read()
                return self._refused(path, answer)
            if leaves:
                return "left in the middle"
            text = answer.read().decode()
        if not content["stream"]:
            json.loads(text)
            return "200"
        if '"error"' in text.rstrip().rsplit("\n\n", 1)[-1]:
            return "retry: error event"
        ended = "message_stop" in text if path == "/v1/messages" else text.rstrip().endswith("data: [DONE]")
        if not ended:
            self._report.improper.append(f"{path}: a stream without an end: …{text[-200:]!r}")
            return "improper"
        return "200 streamed"

    def _refused(self, path: str, answer: httpx.Response) -> str:
        error = answer.json().get("error", {})
        if answer.status_code in (503, 529) and "retry-after" in answer.headers and error.get("message"):
            return f"retry: {answer.status_code}"
        self._report.improper.append(f"{path}: {answer.status_code} {answer.text[:200]}")
        return f"improper: {answer.status_code}"
