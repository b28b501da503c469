"""`/omlxd/requests` and `/omlxd/why-miss`: the last requests, and why a cached prefix ended.

The engine explains (engine/server/explain.py); what only the SSD cache's account knows, that a file was
there and is gone, is added here. With `--log-cache-misses` each request is explained once it has ended, one
after another, and written down for the daemons that come after this one.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

import msgspec

from ....api.fields.body import ParsedRequest
from ....chat import GenerateRequest
from ....cli.daemon.owner_api import LAST, RecentList, RequestLine, WhyMiss, WhyMissBody
from ....common.clients import client_of_request
from ....errors import InvalidRequest, NotFound, OmlxdError, Unavailable, bad_field
from ....wire.explanation import Explanation
from ...engines.link import in_background
from ...engines.model import ModelEngine
from ...engines.pool import EnginePool
from ...http.generation import OPENAI_CHAT, OPENAI_COMPLETIONS, AnyDialect
from ...http.observe.recent_requests import MOST, RecentRequest, RecentRequests
from ...http.observe.trace import RequestTrace
from .miss_log import LoggedRequest, MissLog, digest_of

Read = TypeVar("Read")
LISTED = 500
"""Requests of the file that a list shows."""


class Explaining:
    """Explains misses. messages, responses: the dialects that have a memory of their own. miss_log: None
    keeps none.
    """

    def __init__(
        self,
        engines: EnginePool,
        recent: RecentRequests,
        messages: AnyDialect,
        responses: AnyDialect,
        miss_log: MissLog | None = None,
    ):
        self._engines = engines
        self._recent = recent
        self._log = miss_log
        self._to_log = deque[RecentRequest](maxlen=MOST)
        self._logs = False
        self._dialects = {
            "/v1/messages": messages,
            "/v1/chat/completions": OPENAI_CHAT,
            "/v1/completions": OPENAI_COMPLETIONS,
            "/v1/responses": responses,
        }

    async def recent(self) -> RecentList:
        kept = [_line(each) for each in self._recent.newest_first()]
        if self._log is None:
            return RecentList(kept)
        ids, sessions = {line.id for line in kept}, {digest_of(line.session): line.session for line in kept}
        logged = await _read(lambda log: [*islice(log.newest_first(), LISTED)], self._log)
        older = (each.request for each in logged if each.request.id not in ids)
        named = (
            msgspec.structs.replace(line, session=sessions.get(line.session, line.session)) for line in older
        )
        return RecentList([*kept, *named])

    async def why(self, asked: WhyMissBody) -> WhyMiss:
        """Explain a request's misses. Raises OmlxdError."""
        if (logged := await self._logged(asked)) is not None:
            return logged
        engine, request, kept = await self.request_of(asked)
        return await self._explained(engine, request, kept)

    async def _explained(
        self, engine: ModelEngine, request: GenerateRequest, kept: RecentRequest | None
    ) -> WhyMiss:
        recomputed = kept.recomputed if kept else 0
        reached = kept.reached + recomputed if kept else -1
        explanation = self._with_fate(await engine.explain(request, reached))
        if kept is None:
            return WhyMiss(engine.model_id, explanation)
        if recomputed:
            explanation = msgspec.structs.replace(explanation, hot_tokens=kept.reached)
        return WhyMiss(kept.model_id, explanation, kept.trace.id, kept.reached, recomputed)

    # ----------------------------------------------------------------- the file

    def note_end(self, trace: RequestTrace) -> None:
        """Write down later why a request that ended missed. The oldest of too many is left out."""
        if self._log is None or (kept := self._recent.find_request(trace.id)) is None:
            return
        self._to_log.append(kept)
        if not self._logs:
            self._logs = True
            in_background(self._write_log(self._log))

    async def _write_log(self, miss_log: MissLog) -> None:
        try:
            while self._to_log:
                kept = self._to_log.popleft()
                logged = LoggedRequest(_line(kept), kept.recomputed, await self._reason_of(kept))
                await asyncio.to_thread(miss_log.append, logged)
        finally:
            self._logs = False

    async def _reason_of(self, kept: RecentRequest) -> Explanation | None:
        if kept.reached < 0:
            return None
        try:
            engine = await self._engines.find_engine(kept.model_id)
            if engine.state != "ready":
                return None  # To load it for this would take the memory of what is wanted.
            return (await self._explained(engine, kept.request, kept)).explanation
        except OmlxdError:
            return None

    async def _logged(self, asked: WhyMissBody) -> WhyMiss | None:
        """Return the file's account of a request that has left memory; None: nothing."""
        if self._log is None or asked.path or not (asked.request_id or asked.session):
            return None
        id = "" if asked.request_id == LAST else asked.request_id
        if self._recent.find_request(id, asked.session) is not None:
            return None
        found = await _read(lambda log: log.find(id, asked.session), self._log)
        if found is None:
            return None
        line = found.request
        if found.explanation is None:
            raise NotFound(
                f"{line.id} ended ({line.outcome}) before its prefix was looked up; no more is logged."
            )
        reached = line.cached_tokens
        return WhyMiss(line.model, found.explanation, line.id, reached, found.recomputed, logged=True)

    # ----------------------------------------------------------------- which request

    async def request_of(
        self, asked: WhyMissBody
    ) -> tuple[ModelEngine, GenerateRequest, RecentRequest | None]:
        """Return the request in question, its model, and where it was made. Raises OmlxdError."""
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
        """Add the fate of the missing file, if there was one."""
        removal = self._engines.cold.removal(explanation.missing) if explanation.missing else None
        if removal is None or explanation.cause == "other_namespace":
            return explanation
        return msgspec.structs.replace(explanation, cause=removal.what, gone_at=removal.when)


async def _read(read: Callable[[MissLog], Read], miss_log: MissLog) -> Read:
    try:
        return await asyncio.to_thread(read, miss_log)
    except OSError as error:
        raise Unavailable(f"The log of cache misses can't be read: {error}") from error


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
        priority=each.priority,
    )
