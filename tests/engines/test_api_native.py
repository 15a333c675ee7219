"""llama-server's own paths, token counts and overflows with a real llama.cpp server behind the gateway."""

from __future__ import annotations

import json

import pytest

from gateway.cli.local_engine import MODEL_NAME
from tests.engines.conftest import real_engine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import eventually, in_loop

pytestmark = pytest.mark.engine("llama-server")
HELLO = [{"role": "user", "content": "Hello there."}]


@in_loop
async def test_an_editors_paths_work_without_a_models_name_and_prompts_too_long_get_their_code() -> (
    None
):
    async with (
        real_engine(slots=2) as engine,
        running_gateway(engine.url, keys=["alice"]) as slotgate,
    ):
        slotgate.models.add(MODEL_NAME)
        await eventually(lambda: slotgate.metric("backend_up"))
        client = slotgate.client
        tokens = (await client.post("/tokenize", json={"content": "Hello there."})).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text["content"].strip() == "Hello there."
        prompt = await client.post("/apply-template", json={"messages": HELLO})
        assert "Hello there." in prompt.json()["prompt"]
        props = (await client.get("/props")).json()
        assert props["total_slots"] == 2
        body = {"prompt": "One, two, three,", "n_predict": 4, "stream": False, "id_slot": 0}
        made = await client.post("/completion", json=body)
        assert made.json()["content"]
        counted = await client.post("/v1/messages/count_tokens", json={"messages": HELLO})
        assert counted.json()["input_tokens"] >= len(tokens["tokens"])
        assert "x-slotgate-estimated" not in counted.headers
        long = [{"role": "user", "content": "word " * 60_000}]
        for path in ("/v1/chat/completions", "/v1/messages"):
            asked = {"messages": long, "max_tokens": 4, "stream": True}
            refused = await client.post(path, json=asked)
            assert refused.status_code == 400
            assert json.loads(refused.content)["error"]["code"] == "context_length_exceeded"
