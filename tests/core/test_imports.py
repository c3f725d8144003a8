"""core imports torch and nothing else from outside; inside it, imports are relative."""

import re
import subprocess
import sys

from tests.imports import ROOT, files, imports

FILES = [file for file in files() if file.parts[0] == "core"]
OUTSIDE = {
    "checkpoints/stored.py": {"numpy"},
    "integrations/mmengine.py": {"mmengine"},
}  # imported when used, as these are
OUTSIDE |= {f"integrations/{name}.py": {name} for name in ("accelerate", "lightning", "transformers")}
OUTSIDE |= {f"triton/{name}.py": {"triton"} for name in ("boundary", "codec")}


def test_only_torch_is_imported_from_outside():
    for file in FILES:
        outside = {name.partition(".")[0] for name in imports(file)} - {"core"}
        allowed = {"torch"} | set(sys.stdlib_module_names) | OUTSIDE.get(str(file.relative_to("core")), set())
        assert outside <= allowed, f"{file} imports {', '.join(outside - allowed)}"


def test_imports_inside_core_are_relative():
    for file in FILES:
        absolute = re.findall(r"^\s*(?:from|import) core\b.*", (ROOT / file).read_text(), re.MULTILINE)
        assert not absolute, f"{file}: {absolute}"


HARNESS = {"tyro", "tqdm", "tensorboard", "timm", "mmengine", "training", "accelerate", "lightning", "transformers"}
FRESH = """
import sys
import torch, torch.distributed.tensor  # torch.hub takes tqdm where it is installed
before = set(sys.modules)
import core
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def test_a_fresh_import_loads_nothing_of_the_harness():
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "core" in run.stdout.split() and not HARNESS & set(run.stdout.split())
