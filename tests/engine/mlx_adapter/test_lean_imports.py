"""What an engine's start leaves out, and that nobody who asks for it misses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import demo_model

REPO = Path(__file__).resolve().parents[3]

NOT_NEEDED = {
    *("llguidance", "openai_harmony", "mlx_vlm", "rich", "prometheus_client", "starlette", "hypercorn"),
    *("mlx_lm.server", "mlx_lm.tuner", "mlx_lm.evaluate", "huggingface_hub.inference._client"),
    *("transformers.modeling_utils", "transformers.pipelines", "transformers.trainer"),
    *("transformers.image_utils", "transformers.processing_utils"),
}
"""Of what is installed with omlxd."""

SERVES_ONE = """
import json, os, socket, sys, threading
from omlxd import chat, wire
from omlxd.engine.server.service import EngineService

front, engine = socket.socketpair()
threading.Thread(target=EngineService(engine).run, daemon=True).start()
decoder, messages = wire.FrameDecoder(wire.ToFront), []

def wait_for(kind):
    while True:
        for message in decoder.feed(front.recv(1 << 18)):
            assert not isinstance(message, wire.LoadFailed), message
            events = [event for _, event in getattr(message, "events", ())]
            messages.extend([message, *events])
        if any(isinstance(message, kind) for message in messages):
            return

wait_for(wire.Device)
load = wire.Load(model_path=sys.argv[1], model_id="demo", cache=wire.CacheSettings())
front.sendall(wire.encode(load))
wait_for(wire.Loaded)
said = chat.Message(role="user", parts=(chat.TextPart("Hello"),))
request = chat.GenerateRequest(
    prompt=chat.Conversation(messages=(said,)), sampling=chat.Sampling(max_tokens=2, temperature=0.0)
)
front.sendall(wire.encode(wire.Generate(id=1, request=request)))
wait_for(chat.Finished)
unread = ["_omlxd_rest" in vars(sys.modules[name]) for name in ("transformers", "transformers.models")]
print(json.dumps({"modules": sorted(sys.modules), "unread": unread}), flush=True)
os._exit(0)  # As an engine does: Python's own end would stop a thread that is inside MLX, and abort.
"""

LEARNS = """
import json, sys
if sys.argv[1] == "lean":
    import omlxd.engine.mlx_adapter
import transformers, transformers.models
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

classes = "LlamaTokenizer Qwen2TokenizerFast GemmaTokenizer PreTrainedTokenizerFast T5TokenizerFast \\
CohereTokenizer FNetTokenizerFast NoSuchTokenizerFast BloomTokenizer".split()
found = {name: tokenizer_class_from_name(name) for name in classes}
told = {"classes": {name: one and [one.__module__, one.__name__] for name, one in found.items()}}
for name in ("NoSuchThing", "__wrapped__"):
    told[name] = [hasattr(transformers, name), hasattr(transformers.models, name)]
told["config"] = transformers.LlamaConfig.__module__
for module in (transformers, transformers.models):
    told[module.__name__] = {
        "all": sorted(module.__all__),
        "dir": [name for name in sorted(dir(module)) if not name.startswith("_")],
        "places": module._class_to_module,
        "modules": sorted(module._modules),
        "missing": module._object_missing_backend,
        "structure": {name: sorted(names) for name, names in module._import_structure.items()},
    }
print(json.dumps(told, sort_keys=True))
"""


def run(script: str, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(REPO), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_engine_answers_without_what_an_answer_does_not_need():
    told = run(SERVES_ONE, str(demo_model()))
    loaded = set(told["modules"])
    assert not NOT_NEEDED & loaded
    assert {name for name in loaded if name.startswith("transformers.models.")} <= {
        "transformers.models.auto",
        *(f"transformers.models.auto.{name}" for name in AUTO),
        *(f"transformers.models.{name}" for name in MODELS),
    }
    assert told["unread"] == [True, True], "transformers read all of its models"


AUTO = ("auto_factory", "configuration_auto", "tokenization_auto", "auto_mappings")
MODELS = (
    *("encoder_decoder", "encoder_decoder.configuration_encoder_decoder"),
    *("qwen3", "qwen3.configuration_qwen3"),  # The demo's own.
)


@pytest.fixture(scope="module")
def learnt() -> tuple[dict, dict]:
    """What transformers knows after somebody asked for a name it had not read: ours, and untouched."""
    return run(LEARNS, "lean"), run(LEARNS, "plain")


@pytest.mark.slow
def test_whoever_asks_for_more_gets_what_transformers_gives(learnt):
    lean, plain = learnt
    assert lean["classes"] == plain["classes"]
    assert lean["classes"]["NoSuchTokenizerFast"] is None
    assert lean["config"] == plain["config"] == "transformers.models.llama.configuration_llama"
    for name in ("NoSuchThing", "__wrapped__"):
        assert lean[name] == plain[name] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["transformers", "transformers.models"])
@pytest.mark.parametrize("what", ["all", "places", "modules", "missing", "structure", "dir"])
def test_the_lists_are_whole_then(learnt, module, what):
    lean, plain = learnt
    assert lean[module][what] == plain[module][what]
    assert len(lean[module][what]) > 100


@pytest.mark.slow
def test_transformers_that_was_imported_before_is_left_alone():
    told = run(
        "import json, transformers, omlxd.engine.mlx_adapter as adapter\n"
        "from transformers.utils import import_utils\n"
        "print(json.dumps({'file': import_utils.define_import_structure.__module__}))"
    )
    assert told == {"file": "transformers.utils.import_utils"}
