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
