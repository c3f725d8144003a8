"""The harness that the train scripts share: recipes, the run around a loop, optimizers, data, ZeRO, checkpoints."""

import importlib.metadata
import sys
from importlib.util import find_spec


def require(extra: str, *packages: str) -> None:
    """Ends the program with one line and status 2 if a package is missing. The line names the extra to install."""
    if missing := [name for name in packages if find_spec(name) is None]:
        _end(f"{' and '.join(missing)} not installed: run pip install -e '.[{extra}]' in the repository")


def refuse_both(forks: dict[str, str]) -> None:
    """Ends the program with one line and status 2 if a package is installed together with its fork of the same name.

    The two overwrite each other's files. `forks` maps a package's name to its fork's.
    """
    if both := [name for name, fork in forks.items() if _installed(name) and _installed(fork)]:
        ours = " ".join(forks[name] for name in both)
        _end(
            f"{' and '.join(both)} installed together with {ours}, and they overwrite each other's files: run pip "
            f"uninstall {' '.join(both)} {ours}, then pip install -c constraints.txt {ours}"
        )


def _installed(name: str) -> bool:
    return next(iter(importlib.metadata.distributions(name=name)), None) is not None


def _end(reason: str) -> None:
    print(f"error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


require("tasks", "tyro", "tqdm")
