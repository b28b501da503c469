"""Texts a second through /v1/embeddings, beside mlx-vlm's own server; and vectors beside transformers'.

    python -m tools.bench.embeddings --mlx-vlm PYTHON [--texts 1000] [--tokens 200] [--batches 1,100]
                                     [--spread] [--rounds 3] [--width 128] [--layers 2]
    python -m tools.bench.embeddings --mlx-vlm PYTHON --cosine

PYTHON is one that has mlx-vlm's server and torch (`pip install 'mlx[cpu]' mlx-vlm torch` in a venv of its
own). One BERT of random weights, float32, one run, the peers in turn, round after round (A B A B …), medians
at the end. A row is a number of texts in each request, one request after the other. --spread: texts are of 20
to `--tokens` tokens, so that padding counts. On a CPU both compute with the BLAS of MLX's wheel; `omlxd auto`
is omlxd with the BLAS that it finds by itself. The aim: no row slower than mlx-vlm's.

--cosine: a tiny model of each family; the least cosine between a text's vector here and by transformers
(torch, float32). The aim: 0.9999. Exit status 1 below it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from tools.bench.serve import OURS, Server, free_port

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests" / "support")]

THEIRS, AUTO = "mlx-vlm", "omlxd auto"
AIM = 0.9999
POOLING = {"qwen3": "lasttoken", "gemma3_text": "mean_tokens", "bert": "mean_tokens"}
"""What `1_Pooling` of a family says; `cls_token` of the others."""
AS_RELEASED = {
    "gemma3_text": {"use_bidirectional_attention": True, "rope_theta": 1e6, "sliding_window": 32},
}
"""What EmbeddingGemma's own config says, and mlx-vlm assumes, but for a smaller window."""
WORDS = ("kettle", "saucer", "spoon", "cup", "table", "lamp", "river", "stone", "window", "garden", "paper")

BY_TRANSFORMERS = """
import json, sys, torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer
folder, pooling = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
weights = load_file(folder + "/model.safetensors")
dense = [weights[name] for name in sorted(weights) if name.startswith("dense.")]
vectors = []
for text in json.load(sys.stdin):
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    one = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[pooling]
    for matrix in dense:  # EmbeddingGemma's, which stand behind the pooling.
        one = matrix @ one
    vectors.append((one / one.norm()).tolist())
print(json.dumps(vectors))
"""


class EmbeddingServer(Server):
    """A server that is asked for vectors."""

    async def ask(self, prompts: list[Any], n: int) -> list[Any]:
        """Only so that `start` waits until it answers."""
        async with httpx.AsyncClient(timeout=900) as client:
            body = {"model": self._model, "input": ["hello there"]}
            (await client.post(f"{self.url}/v1/embeddings", json=body)).raise_for_status()
        return []

    def vectors(self, texts: list[str], batch: int) -> np.ndarray:
        """Of all texts, `batch` of them a request."""
        rows: list[list[float]] = []
        with httpx.Client(timeout=900) as client:
            for at in range(0, len(texts), batch):
                body = {"model": self._model, "input": texts[at : at + batch]}
                answer = client.post(f"{self.url}/v1/embeddings", json=body)
                answer.raise_for_status()
                rows += [row["embedding"] for row in answer.json()["data"]]
        return np.array(rows, np.float32)


def texts_of(folder: Path, count: int, tokens: int, spread: bool) -> list[str]:
    """Different texts of exactly `tokens` tokens; `spread`: of 20 to as many."""
    tokenizer, draw = Tokenizer.from_file(str(folder / "tokenizer.json")), random.Random(5)
    texts = []
    for _ in range(count):
        wanted = draw.randint(20, tokens) if spread else tokens
        text = ""
        while True:
            more = f"{text} {draw.choice(WORDS)}"
            if len(tokenizer.encode(more).ids) > wanted:
                break
            text = more
        texts.append(text)
    return texts


def start(peer: str, mlx_vlm: str, model: Path, home: Path) -> EmbeddingServer:
    port = free_port()
    if peer == THEIRS:
        command = [mlx_vlm, "-m", "mlx_vlm.server", "--embedding-model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        return EmbeddingServer(peer, command, port, str(model), env={"HF_HUB_OFFLINE": "1"})
    command = [sys.executable, "-m", "omlxd", "serve", "--model", str(model), "--port", str(port)]
    command += ["--base-path", str(home), "--log-level", "warning"]
    env = {"OMLXD_CPU_BLAS": "auto" if peer == AUTO else "off"}
    return EmbeddingServer(peer, command, port, model.name, env=env)


def throughput(options: argparse.Namespace, home: Path) -> int:
    import embedders

    shape = {"hidden_size": options.width, "intermediate_size": 4 * options.width}
    shape |= {"num_hidden_layers": options.layers, "max_position_embeddings": max(512, options.tokens)}
    embedders.EMBEDDERS["bert"] = {**embedders.EMBEDDERS["bert"], **shape}
    model = embedders.build_embedder("bert", home / "bench-bert", "mean_tokens")
    texts = texts_of(model, options.texts, options.tokens, options.spread)
    batches = [int(each) for each in options.batches.split(",")]
    peers = options.peers.split(",")
    rates: dict[tuple[int, str], list[float]] = {}
    vectors: dict[str, np.ndarray] = {}
    for index in range(options.rounds):
        for peer in peers:
            server = start(peer, options.mlx_vlm, model, home / f"{peer}-{index}")
            try:
                server.vectors(texts[:10], 10)
                for batch in batches:
                    some = texts if batch > 1 else texts[: len(texts) // 5]
                    began = time.perf_counter()
                    vectors[peer] = server.vectors(some, batch)
                    rates.setdefault((batch, peer), []).append(len(some) / (time.perf_counter() - began))
                    print(
                        f"{batch} a request, {peer}: {rates[batch, peer][-1]:.1f}",
                        file=sys.stderr,
                        flush=True,
                    )
            finally:
                server.kill()
    print(f"| texts a second | {' | '.join(peers)} |\n|---|{'---|' * len(peers)}")
    for batch in batches:
        cells = [f"{statistics.median(rates[batch, peer]):.1f}" for peer in peers]
        print(f"| {batch} a request | {' | '.join(cells)} |")
    if len(peers) > 1:
        least = least_cosine(vectors[peers[0]], vectors[peers[-1]])
        print(f"least cosine between {peers[0]} and {peers[-1]}: {least:.7f}")
    return 0


def least_cosine(one: np.ndarray, two: np.ndarray) -> float:
    """Of rows of length 1."""
    return float((one * two).sum(1).min())


def cosines(options: argparse.Namespace, home: Path) -> int:
    import embedders

    least = 1.0
    for family in list(embedders.EMBEDDERS):
        pooling = POOLING.get(family, "cls_token")
        # Tokens that some of transformers' models count on, outside of a tiny vocabulary by default.
        named = {
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "cls_token_id": 0,
            "sep_token_id": 0,
        }
        embedders.EMBEDDERS[family] = {**named, **embedders.EMBEDDERS[family], **AS_RELEASED.get(family, {})}
        model = embedders.build_embedder(family, home / family, pooling)
        texts = texts_of(model, 20, 60, spread=True)
        server = start(OURS, options.mlx_vlm, model, home / f"{family}-home")
        try:
            ours = server.vectors(texts, 20)
        finally:
            server.kill()
        command = [options.mlx_vlm, "-c", BY_TRANSFORMERS, str(model), pooling]
        said = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
        if said.returncode:
            sys.exit(f"{family}: {said.stderr[-2000:]}")
        cosine = least_cosine(ours, np.array(json.loads(said.stdout), np.float32))
        print(f"{family}, {pooling}: {cosine:.7f}", flush=True)
        least = min(least, cosine)
    return 0 if least >= AIM else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mlx-vlm", metavar="PYTHON", required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batches", default="1,100", help="texts a request")
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--peers", default=f"{OURS},{AUTO},{THEIRS}")
    parser.add_argument("--cosine", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omlxd-embeddings-") as temporary:
        return (cosines if options.cosine else throughput)(options, Path(temporary))


if __name__ == "__main__":
    sys.exit(main())
