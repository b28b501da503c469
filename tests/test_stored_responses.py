"""Stored responses are read again, listed and forgotten."""

from app_client import client, message_of
from fake_engine import EVERYTHING, FakeEngine, app_of

ITEMS = [
    {"role": "user", "content": "hi"},
    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x", "unknown": 1},
]


async def test_a_response_is_kept_and_deleted():
    async with client(app_of(FakeEngine(EVERYTHING))) as http:
        told = (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()
        path = f"/v1/responses/{told['id']}"
        assert (await http.get(path)).json() == told
        (item,) = (await http.get(f"{path}/input_items")).json()["data"]
        assert item["role"] == "user" and item["content"] == [{"type": "input_text", "text": "hi"}]
        gone = (await http.delete(path)).json()
        assert gone == {"id": told["id"], "deleted": True, "object": "response"}
        for answer in (await http.get(path), await http.delete(path), await http.get(f"{path}/input_items")):
            assert answer.status_code == 404 and told["id"] in message_of(path, answer)
        follow = {"model": "tiny", "input": "and?", "previous_response_id": told["id"]}
        assert (await http.post("/v1/responses", json=follow)).status_code == 404


async def test_what_is_not_to_be_stored_is_not():
    async with client(app_of(FakeEngine())) as http:
        told = (
            await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "store": False})
        ).json()
        assert (await http.get(f"/v1/responses/{told['id']}")).status_code == 404


async def test_items_come_in_pages():
    async with client(app_of(FakeEngine())) as http:
        told = (await http.post("/v1/responses", json={"model": "tiny", "input": ITEMS})).json()
        path = f"/v1/responses/{told['id']}/input_items"
        whole = (await http.get(path)).json()
        number = told["id"].removeprefix("resp_")
        first, last = f"item_{number}00", f"item_{number}02"
        assert [item["id"] for item in whole["data"]] == [last, "fc_1", first]
        assert whole["data"][0]["unknown"] == 1 and whole["data"][2]["type"] == "message"
        page = (await http.get(f"{path}?order=asc&limit=2")).json()
        assert [item["id"] for item in page["data"]] == [first, "fc_1"] and page["has_more"]
        page = (await http.get(f"{path}?order=asc&limit=2&after=fc_1")).json()
        assert page["first_id"] == page["last_id"] == last and not page["has_more"]
        assert (await http.get(f"{path.removesuffix('/input_items')}?stream=true")).status_code == 400
        for wrong in ("0", "101", "x", "²"):
            assert (await http.get(f"{path}?limit={wrong}")).status_code == 400
