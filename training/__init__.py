"""The harness that the train scripts share: recipes, the run around a loop, optimizers, data, ZeRO, checkpoints."""

import sys
from importlib.util import find_spec


def require(extra: str, *packages: str) -> None:
    """Ends the program with one line and status 2 if a package is missing. The line names the extra to install."""
    if missing := [name for name in packages if find_spec(name) is None]:
        line = f"error: {' and '.join(missing)} not installed: run pip install -e '.[{extra}]' in the repository"
        print(line, file=sys.stderr, flush=True)
        raise SystemExit(2)


require("tasks", "tyro", "tqdm")
