"""Every call of the product that could run code from a file, from text or from a peer: listed here, none unsafe."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from tests.imports import ROOT

PRODUCT = ("core", "training", "vision", "segmentation", "pointcloud", "language", "bench", "slurm", "results")
WEIGHTS, NO_PICKLE = {"weights_only": True}, {"allow_pickle": False}
# (file, call as it is written) -> what the call must say for itself; {}: the file's own code makes it harmless, as told
LOADS: dict[tuple[str, str], dict[str, bool]] = {
    ("core/elastic/members.py", "torch.load"): WEIGHTS,
    ("core/checkpoint/stored.py", "torch.load"): WEIGHTS,
    ("training/weights/read.py", "torch.load"): WEIGHTS,
    ("training/weights/read.py", "kind.from_pretrained"): {"use_safetensors": True},
    ("segmentation/runner.py", "Config.fromfile"): {},  # --config runs the user's own program
    # with the weights_only that the user gives to the trainer, True if none is given
    ("core/integrations/lightning.py", "super().load_checkpoint"): {},
    ("training/data/files.py", "np.load"): NO_PICKLE,
    ("pointcloud/sources.py", "np.lib.format.read_array"): NO_PICKLE,
    # no pickle, and what it says of code is checked in language.pretrained.LOCAL
    ("language/pretrained.py", "AutoConfig.from_pretrained"): {},
    ("language/pretrained.py", "AutoModelForCausalLM.from_pretrained"): {"use_safetensors": True},
    ("language/pretrained.py", "AutoTokenizer.from_pretrained"): {},
    # a base config of mmseg's own, which the project names itself
    ("segmentation/model.py", "ConfigFile.fromfile"): {},
    # modules that the project names itself
    ("bench/chaos/crew.py", "runpy.run_module"): {},
    # results of processes that the same one has started, in a temporary folder of its own
    ("core/testing/__init__.py", "pickle.loads"): {},
    ("bench/cluster/nodes.py", "pickle.loads"): {},
}
# Names of calls that may load: their last part. Of these, what begins with one of HARMLESS runs nothing.
LOADERS = {
    "load", "loads", "load_all", "full_load", "unsafe_load", "Unpickler", "from_pretrained", "load_checkpoint",
    "load_state_dict_from_url", "load_dataset", "read_pickle", "extract", "extractall", "unpack_archive", "system",
    "popen", "getoutput", "getstatusoutput", "create_subprocess_shell", "run_path", "run_module", "fromfile",
    "TaskManager", "SourceFileLoader", "exec_module", "interact", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list", "recv_object_list", "read_array", "open_memmap",
}  # fmt: skip
HARMLESS = ("json.", "tomllib.", "tl.", "np.fromfile")
OWN = {  # functions of the project that are called load, or popen, and lead to calls in the list
    "data.load", "self.source.load", "ScalarLog.load", "cluster.popen", "image.load", "self._held.load",
}  # fmt: skip
EVALUATE = {"eval", "exec", "compile", "__import__"}


def files() -> list[Path]:
    found = [path for room in PRODUCT for path in sorted((ROOT / room).rglob("*.py"))]
    return [*found, *ROOT.glob("*.py")]


def loads(text: str) -> Iterator[tuple[str, dict[str | None, object], int]]:
    """(call, its keywords that are constants, line) of each use of a loader: called, named, or imported by name."""
    said: dict[int, dict[str | None, object]] = {}  # by the node that is called, which comes later
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            constants = said[id(node.func)] = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            if constants.get("shell", False) is not False:
                yield "shell=True", constants, node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] not in PRODUCT:
            names = {f"{node.module}.{alias.name}" for alias in node.names if alias.name in LOADERS}
            yield from ((name, {}, node.lineno) for name in names)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load) and is_loader(node, said):
            yield ast.unparse(node), said.get(id(node), {}), node.lineno


def is_loader(node: ast.Attribute | ast.Name, called: Container[int]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in EVALUATE and (id(node) in called or node.id != "compile")
    name = ast.unparse(node)
    return node.attr in LOADERS and not name.startswith(HARMLESS) and name not in OWN


def complaints(path: str, text: str, seen: set[tuple[str, str]]) -> list[str]:
    found = []
    for call, said, line in loads(text):
        wanted = LOADS.get((path, call))
        seen.add((path, call))
        if wanted is None:
            found.append(f"{path}:{line}: {call} is not in the list")
        elif any(said.get(key) is not value for key, value in wanted.items()):
            found.append(f"{path}:{line}: {call} has to say {wanted}")
    return found


def test_every_load_of_the_product_is_listed_and_safe():
    seen: set[tuple[str, str]] = set()
    found = [line for path in files() for line in complaints(str(path.relative_to(ROOT)), path.read_text(), seen)]
    assert not found, "\n".join(found)
    assert seen == LOADS.keys(), "the list names calls that are no more"


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "from torch import load as l; l(f)",
        "import numpy as np; np.load(f)",
        "import pickle; pickle.loads(b)",
        "tar.extract(member)",
        "AutoModel.from_pretrained(name)",
        "eval(text)",
        "dist.all_gather_object(found, mine)",
    ],
)
def test_an_unsafe_load_would_be_seen(line: str):
    assert complaints("segmentation/model.py", line, set()), line


def test_no_code_of_a_models_folder_is_run():
    from language.pretrained import LOCAL

    assert LOCAL == {"local_files_only": True, "trust_remote_code": False}
    assert all(hasattr(builtins, name) for name in EVALUATE)
