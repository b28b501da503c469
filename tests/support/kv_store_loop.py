"""A child process for test_sigkill.py: stores chains through real writer threads until it is killed.

    python kv_store_loop.py ROOT CAP_FILES SEED

An odd seed is in write-back. Prints "ready" once the folder is open, and then a dot a request.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kv_fakes import Rig, chain, payload_of

from omlxd.kv.cold.writer import StoreWriter


def main(root: Path, cap: int, seed: int) -> None:
    rig = Rig(root, hot=8, cap=cap, write_back=seed % 2 == 1)
    rig.use_writer(StoreWriter(rig.cold, rig.lease, max_queue_bytes=1 << 20, threads=3))
    print("ready", flush=True)
    dice = random.Random(seed)
    while True:
        # The parent knows these chains: chain_of() in the test.
        keys = chain([dice.randrange(40), *range(1, 24)])
        table = rig.store.new_table()
        rig.store.extend_match(table, [key.block_hash for key in keys], len(keys) - 1)
        for index, block in enumerate(list(table.blocks)):
            if rig.read(keys[index], block) is None:
                table.truncate(index)
                break
        for index in range(len(table.blocks), len(keys)):
            table.append(rig.store.block_size)
            if rig.store.wants(keys[index].block_hash, index):
                rig.store.put(table, index, keys[index], payload_of(keys[index].block_hash))
        table.free()
        rig.store.record_use([key.block_hash for key in keys])
        rig.pump()
        if dice.random() < 0.2:
            rig.flusher.tick()
        print(".", end="", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
