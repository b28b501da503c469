"""`python split_ranks.py RANK HOSTS FAMILY=FOLDER…`: a rank of models that are split, for test_split.py.

Rank 0 prints, a line a model, its split and how far the logits of its passes are from the whole model's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.load import run_passes
from omlxd.engine.mlx_adapter.runtime.arrays import distance

PASSES = [[*range(5, 69)], [*range(3, 40)], [7], [8]]

if __name__ == "__main__":
    rank, hosts = int(sys.argv[1]), sys.argv[2].split(",")
    group = mlx_adapter.join_group(rank, hosts)
    for folder in map(Path, sys.argv[3:]):
        share = mlx_adapter.load(folder, group=group)
        _, logits = run_passes(share.model, PASSES)
        if rank == 0:
            whole = mlx_adapter.load(folder)
            far = distance(logits, run_passes(whole.model, PASSES)[1])
            print(folder.name, share.split, share.batchable, far, flush=True)
