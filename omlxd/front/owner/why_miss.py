"""`/omlxd/requests` and `/omlxd/why-miss`: the last requests, and why one's cached prefix ended.

The engine explains (engine/explain.py); what only the SSD cache's account knows, that a file was
there and is gone, is added here.
"""

from __future__ import annotations

import urllib.parse

import msgspec

from ...api.body import ParsedRequest
from ...chat import GenerateRequest
from ...cli.owner_api import LAST, RecentList, RequestLine, WhyMiss, WhyMissBody
from ...common.clients import client_of_request
from ...errors import InvalidRequest, NotFound, bad_field
from ...explanation import Explanation
from ..engines.model import ModelEngine
from ..engines.pool import EnginePool
from ..http.generation import OPENAI_CHAT, OPENAI_COMPLETIONS, AnyDialect
from ..http.recent_requests import RecentRequest, RecentRequests


class Explaining:
    """messages, responses: the dialects that have a memory of their own."""

    def __init__(
        self, engines: EnginePool, recent: RecentRequests, messages: AnyDialect, responses: AnyDialect
    ):
        self._engines = engines
        self._recent = recent
        self._dialects = {
            "/v1/messages": messages,
            "/v1/chat/completions": OPENAI_CHAT,
            "/v1/completions": OPENAI_COMPLETIONS,
            "/v1/responses": responses,
        }

    async def recent(self) -> RecentList:
        return RecentList([_line(each) for each in self._recent.newest_first()])

    async def why(self, asked: WhyMissBody) -> WhyMiss:
        """Raises OmlxdError."""
        engine, request, kept = await self.request_of(asked)
        recomputed = kept.recomputed if kept else 0
        reached = kept.reached + recomputed if kept else -1
        explanation = self._with_fate(await engine.explain(request, reached))
        if kept is None:
            return WhyMiss(engine.model_id, explanation)
        if recomputed:
            explanation = msgspec.structs.replace(explanation, hot_tokens=kept.reached)
        return WhyMiss(kept.model_id, explanation, kept.trace.id, kept.reached, recomputed)

    async def request_of(
        self, asked: WhyMissBody
    ) -> tuple[ModelEngine, GenerateRequest, RecentRequest | None]:
        """The request that is asked about, whose it is, and where it was made. Raises OmlxdError."""
        if asked.path:
            parsed = self._parsed(asked)
            return await self._engines.find_engine(parsed.model), parsed.generate, None
        if not (asked.request_id or asked.session):
            raise bad_field(
                "request_id",
                f'name a request by its id, as "{LAST}", by its session, or by path and body',
            )
        id = "" if asked.request_id == LAST else asked.request_id
        kept = self._recent.find_request(id, asked.session)
        if kept is None:
            what = id or (f"session {asked.session}" if asked.session else "")
            raise NotFound(
                f"Of {what[:200]} no request is kept; `omlxd cache why-miss` lists the last ones."
                if what
                else "No request has been made yet."
            )
        return await self._engines.find_engine(kept.model_id), kept.request, kept

    def _parsed(self, asked: WhyMissBody) -> ParsedRequest:
        path = urllib.parse.urlsplit(asked.path).path
        dialect = self._dialects.get(path)
        if dialect is None:
            raise InvalidRequest(f"path: {path[:200]} takes no prompt; one of {', '.join(self._dialects)}.")
        headers = {name.lower(): value for name, value in asked.headers.items()}
        return dialect.parse(msgspec.json.encode(asked.body), headers)

    def _with_fate(self, explanation: Explanation) -> Explanation:
        """With the fate of the missing file, if it was there."""
        removal = self._engines.cold.removal(explanation.missing) if explanation.missing else None
        if removal is None or explanation.cause == "other_namespace":
            return explanation
        return msgspec.structs.replace(explanation, cause=removal.what, gone_at=removal.when)


def _line(each: RecentRequest) -> RequestLine:
    return RequestLine(
        id=each.trace.id,
        model=each.model_id,
        session=each.session,
        path=each.trace.path,
        began=each.began,
        prompt_tokens=each.prompt_tokens,
        cached_tokens=each.reached,
        outcome=each.trace.outcome,
        opening=each.opening,
        client=client_of_request(each.trace.client, each.session),
        turns=each.turns,
    )
