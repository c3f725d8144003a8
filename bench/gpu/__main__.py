import os
import sys
from pathlib import Path


def take_wheels() -> None:
    """The wheels in CO2_WHEELS, for this process and those it starts; what is installed comes first."""
    wheels = sorted(map(str, Path(os.environ.get("CO2_WHEELS") or os.devnull).resolve().glob("*.whl")))
    sys.path.extend(wheels)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *wheels]))


if __name__ == "__main__":  # a process that multiprocessing starts imports this file, too
    take_wheels()
    try:
        from bench.gpu.command import main
        from training.script import launch
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: install it, or put its wheel into CO2_WHEELS", file=sys.stderr)
        sys.exit(2)
    launch(main)
