"""Every call of the product that could run code from a file, from text or from a peer: listed here, none unsafe."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imports import ROOT

PRODUCT = ("core", "training", "vision", "segmentation", "pointcloud", "language", "bench", "slurm", "results")
WEIGHTS, NO_PICKLE = {"weights_only": True}, {"allow_pickle": False}
# (file, call) -> what the call must say for itself; {} where the file's own code makes it harmless, as is told
LOADS: dict[tuple[str, str], dict[str, bool]] = {
    ("core/elastic/island.py", "torch.load"): WEIGHTS,
    ("core/elastic/members.py", "torch.load"): WEIGHTS,
    ("core/checkpoint/stored.py", "torch.load"): WEIGHTS,
    ("training/weights/read.py", "torch.load"): WEIGHTS,
    ("training/weights/read.py", "kind.from_pretrained"): {"use_safetensors": True},
    ("segmentation/runner.py", "mmengine.config.Config.fromfile"): {},  # --config runs the user's own program
    # with the weights_only that the user gives to the trainer, True if none is given
    ("core/integrations/lightning.py", "super().load_checkpoint"): {},
    ("training/data/files.py", "numpy.load"): NO_PICKLE,
    ("pointcloud/sources.py", "numpy.lib.format.read_array"): NO_PICKLE,
    # no pickle, and what it says of code is checked in language.pretrained.LOCAL
    ("language/pretrained.py", "transformers.AutoConfig.from_pretrained"): {},
    ("language/pretrained.py", "transformers.AutoModelForCausalLM.from_pretrained"): {"use_safetensors": True},
    ("language/pretrained.py", "transformers.AutoTokenizer.from_pretrained"): {},
    # a base config of mmseg's own, which the project names itself
    ("segmentation/model.py", "mmengine.config.Config.fromfile"): {},
    # JSON of results/
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
HARMLESS = ("json.", "tomllib.", "tl.", "triton.language.", "numpy.fromfile")
OWN = {  # functions of the project that are called load, or popen, and lead to calls in the list
    "checkpoint.load", "data.load", "report.load", "source.load", "self.source.load", "ScalarLog.load", "cluster.popen",
    "image.load", "way.loads", "self._held.load",
}  # fmt: skip
EVALUATE = {"eval", "exec", "compile", "__import__"}


def files() -> list[Path]:
    found = [path for room in PRODUCT for path in sorted((ROOT / room).rglob("*.py"))]
    return [*found, *ROOT.glob("*.py")]


def imported(tree: ast.AST) -> dict[str, str]:
    """What each name that an import binds stands for."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            whole = {a.asname: a.name for a in node.names if a.asname}
            known |= whole | {a.name.partition(".")[0]: a.name.partition(".")[0] for a in node.names if not a.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return known


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """`np.load` as numpy.load."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, known)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func, known)}()"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def loads(text: str) -> Iterator[tuple[str, dict[str | None, object], int]]:
    """(call, its keywords that are constants, line) of each use of a loader, called or only named."""
    tree = ast.parse(text)
    known = imported(tree)
    said: dict[int, dict[str | None, object]] = {}  # by the node that is called
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            constants = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            said[id(node.func)] = constants
            if constants.get("shell", False) is not False:
                yield "shell=True", constants, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            name = dotted(node, known)
            if is_loader(node, name, known, called=id(node) in said):
                yield name, said.get(id(node), {}), node.lineno


def is_loader(node: ast.AST, name: str, known: dict[str, str], *, called: bool) -> bool:
    if isinstance(node, ast.Name) and node.id not in known:  # a builtin, or the file's own
        return node.id in EVALUATE and (called or node.id != "compile")
    ours = own(name) in OWN and not name.startswith("torch.")
    return name.rpartition(".")[2] in LOADERS and not name.startswith(HARMLESS) and not ours


def own(name: str) -> str:
    """The last two names, or three behind self."""
    parts = name.split(".")
    return ".".join(parts[-3:] if parts[0] == "self" else parts[-2:])


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
