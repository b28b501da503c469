"""Stored responses are read again and forgotten."""

from app_client import client, message_of
from fake_engine import EVERYTHING, FakeEngine, app_of


async def test_a_response_is_kept_and_deleted():
    async with client(app_of(FakeEngine(EVERYTHING))) as http:
        told = (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()
        path = f"/v1/responses/{told['id']}"
        assert (await http.get(path)).json() == told
        assert (await http.get(f"{path}?stream=true")).status_code == 400
        gone = (await http.delete(path)).json()
        assert gone == {"id": told["id"], "deleted": True, "object": "response"}
        for answer in (await http.get(path), await http.delete(path)):
            assert answer.status_code == 404 and told["id"] in message_of(path, answer)
        follow = {"model": "tiny", "input": "and?", "previous_response_id": told["id"]}
        assert (await http.post("/v1/responses", json=follow)).status_code == 404


async def test_no_response_has_an_id_that_was_never_given():
    async with client(app_of(FakeEngine())) as http:
        for answer in (await http.get("/v1/responses/x"), await http.delete("/v1/responses/x")):
            assert answer.status_code == 404
            assert message_of("/v1/responses", answer).startswith("There is no response 'x' here")


async def test_what_is_not_to_be_stored_is_not():
    async with client(app_of(FakeEngine())) as http:
        told = (
            await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "store": False})
        ).json()
        assert (await http.get(f"/v1/responses/{told['id']}")).status_code == 404


async def test_what_a_response_was_asked_with_is_listed():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hm"}],
        },
        {"role": "user", "content": "And?", "phase": None},
    ]
    async with client(app_of(FakeEngine())) as http:
        ids = []
        for given, more in ((items, {}), ("hi", {}), ("hi", {"store": False})):
            answer = await http.post("/v1/responses", json={"model": "tiny", "input": given, **more})
            ids.append(answer.json()["id"])
        path = f"/v1/responses/{ids[0]}/input_items"
        page = (await http.get(path, params={"order": "asc"})).json()
        first, *_, last = page["data"]
        assert first["type"] == "message" and first["content"] == [{"type": "input_text", "text": "hi"}]
        assert [item["id"] for item in page["data"]] == [f"{ids[0]}_0", "rs_1", "m", f"{ids[0]}_3"]
        assert page["first_id"] == first["id"] and page["last_id"] == last["id"] and not page["has_more"]
        newest = (await http.get(path, params={"limit": 3})).json()
        assert newest["data"] == page["data"][:0:-1] and newest["has_more"]
        rest = (await http.get(path, params={"after": newest["last_id"]})).json()
        assert rest["data"] == [first] and not rest["has_more"]
        of_text = (await http.get(f"/v1/responses/{ids[1]}/input_items")).json()["data"]
        assert of_text[0]["content"] == [{"type": "input_text", "text": "hi"}]
        assert (await http.get(f"/v1/responses/{ids[2]}/input_items")).status_code == 404
        for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "none"}):
            answer = await http.get(path, params=wrong)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(wrong))


async def test_a_file_search_is_refused_in_words():
    async with client(app_of(FakeEngine())) as http:
        asked = {
            "model": "tiny",
            "input": "hi",
            "tools": [{"type": "file_search", "vector_store_ids": ["v"]}],
        }
        error = (await http.post("/v1/responses", json=asked)).json()["error"]
    assert error["param"] == "tools.0.type" and "searched" in error["message"]
