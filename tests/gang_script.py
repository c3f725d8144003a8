"""A script for results.gang: its first worker sleeps where the last one fails."""

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, option = sys.argv[1:]
    rank, *sizes = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
    Path(folder, rank).write_text(" ".join([*sizes, os.environ["LOCAL_RANK"], option]))
    if option == "--fail":
        time.sleep(1000) if rank == "0" else sys.exit(1)
