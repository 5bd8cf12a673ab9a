"""Ranks as torchrun starts them: with its variables, and a store that is served for them.

torchrun itself starts each rank as a new program, which imports torch for seconds, and does so once
itself; it is run in test_distributed.py.
"""

from contextlib import contextmanager

from torch.distributed import TCPStore


@contextmanager
def environments(world):
    """What torchrun adds to the environment of each rank; the store lives as long as the block."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    yield [
        {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(world)
    ]
    del store
