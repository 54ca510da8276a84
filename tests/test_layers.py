"""The layers of the package: who imports what, how long files are, and who may patch Megatron.

The rules are checked on the syntax tree of every file, so that an import inside a function counts
too. A new file must be given a layer here.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_aro"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
MAX_LINES = 400

# Layer (a file or a folder) -> what it may import beside the standard library. A package stands
# for everything below it.
OWN = "megatron_aro."
LAYERS = {
    "version.py": (),
    "config.py": (),
    "kernels/": ("torch", "triton", OWN + "kernels"),
    "rotation/": ("torch", OWN + "config", OWN + "kernels", OWN + "rotation"),
    "sharding/": (OWN + "config", OWN + "sharding"),
    "runtime/": ("torch", OWN + "config", OWN + "rotation", OWN + "sharding", OWN + "runtime"),
    "optimizer.py": ("torch", OWN + "config", OWN + "rotation"),
    "__init__.py": (
        OWN + "config",
        OWN + "optimizer",
        OWN + "version",
        OWN + "megatron.hooks",
        OWN + "megatron.optimizer",
    ),
    "megatron/": ("torch", "numpy", "packaging", "megatron", "megatron_aro"),
    "pretrain_gpt.py": ("torch", "megatron", "transformer_engine", "megatron_aro"),
    "run.py": ("megatron", "megatron_aro"),
    "iterations.py": ("torch", "megatron", "megatron_aro"),
    "cli/": (
        "torch",
        "numpy",
        "matplotlib",
        "yaml",
        "megatron",
        "emerging_optimizers",
        OWN + "cli",
        OWN + "rotation",
        OWN + "sharding",
        OWN + "megatron",
        OWN + "config",
        OWN + "optimizer",
        OWN + "version",
    ),
}
ONE_PROCESS = (
    "kernels/",
    "rotation/",
    "sharding/",
    "optimizer.py",
)  # know nothing of torch.distributed
PATCHERS = ("megatron/hooks.py", "megatron/cpu_mode/")  # may replace names in other packages


def layer(file: str) -> str:
    found = [key for key in LAYERS if file == key or key.endswith("/") and file.startswith(key)]
    assert len(found) == 1, f"give {file} a layer in {Path(__file__).name}"
    return found[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports: ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def dotted(node: ast.AST) -> str:
    """``a.b`` for the expression a.b, else "?" in the place of what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


class Patches(ast.NodeVisitor):
    """Finds assignments to, and deletions of, attributes and items of what Megatron defines.

    A name counts as Megatron's if it is imported from there or bound, anywhere in the file, to an
    attribute, an item or a choice of such names. What a call returns does not count, import_module
    and getattr excepted: setting attributes of Megatron's objects (arguments, parameters) is
    fine. setattr may act on ``self`` alone, for its object can be anything.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.lines: list[int] = []
        self.names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    module = node.module if isinstance(node, ast.ImportFrom) else alias.name
                    if below(module, ("megatron",)):
                        self.names.add(alias.asname or alias.name.split(".")[0])
        before = None
        while before != len(self.names):  # aliases of aliases
            before = len(self.names)
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign):
                    self.bind(node.targets, node.value)
                elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
                    self.bind([node.target], node.value)
                elif isinstance(node, ast.For | ast.comprehension):
                    self.bind([node.target], node.iter)
        self.visit(tree)

    def bind(self, targets: list[ast.expr], value: ast.expr) -> None:
        if self.is_megatrons(value):
            names = (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
            self.names |= {n.id for n in names if isinstance(n.ctx, ast.Store)}

    def is_megatrons(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            return dotted(node.value) == "sys.modules" or self.is_megatrons(node.value)
        if isinstance(node, ast.Call):
            called = dotted(node.func).rpartition(".")[2]
            return called in ("import_module", "__import__") or (
                called in ("getattr", "vars") and self.is_megatrons(node.args[0])
            )
        if isinstance(node, ast.IfExp | ast.BoolOp | ast.Tuple | ast.List):
            return any(self.is_megatrons(child) for child in ast.iter_child_nodes(node))
        return False

    def visit_Attribute(self, node: ast.Attribute | ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load) and self.is_megatrons(node.value):
            self.lines.append(node.lineno)
        self.generic_visit(node)

    visit_Subscript = visit_Attribute

    def visit_Call(self, node: ast.Call) -> None:
        called = dotted(node.func).rpartition(".")[2]
        if called in ("setattr", "delattr") and dotted(node.args[0]) != "self":
            self.lines.append(node.lineno)
        self.generic_visit(node)


@pytest.mark.parametrize("file", FILES)
def test_imports_stay_within_the_layer(file):
    tree = ast.parse(FILES[file].read_text())
    allowed = (*sys.stdlib_module_names, *LAYERS[layer(file)])
    wrong = sorted({name for name in imported(tree) if not below(name, allowed)})
    assert not wrong, f"{file} may not import {', '.join(wrong)}"
    if layer(file) in ONE_PROCESS:
        used = {
            *imported(tree),
            *(dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)),
        }
        assert not any(below(name, ("torch.distributed",)) for name in used)


@pytest.mark.parametrize("file", FILES)
def test_files_are_short(file):
    lines = len(FILES[file].read_text().splitlines())
    assert lines <= MAX_LINES, f"{file} has {lines} lines, the limit is {MAX_LINES}"


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith(PATCHERS)])
def test_no_other_file_patches_megatron(file):
    lines = Patches(ast.parse(FILES[file].read_text())).lines
    assert not lines, f"{file} patches Megatron on lines {lines}: {PATCHERS[0]} is the place"


@pytest.mark.parametrize(
    "source",
    [
        "import megatron.core as m; m.x = 1",
        "import megatron.core; megatron.core.y.x = 1",
        "from megatron.training import training\ndef f(): training.x = 1",
        "from megatron.training import training; t = training.sub; t.x += 1",
        "from megatron.core import A, B\nfor c in (A, B): c.x = 1",
        "from megatron.core import A; A.registry['aro'] = 1",
        "from megatron.core import A; del A.x",
        "from megatron.core import A; vars(A)['x'] = 1",
        "import importlib; importlib.import_module(name).x = 1",
        "import sys; sys.modules['megatron.core'].x = 1",
        "def f(owner): setattr(owner, 'x', 1)",
    ],
)
def test_the_check_finds_patches(source):
    assert Patches(ast.parse(source)).lines


@pytest.mark.parametrize(
    "source",
    [
        "from megatron.training import get_args; args = get_args(); args.x = 1",
        "from megatron.core import A\nclass B(A):\n  def f(self): self.x = A.y",
        "def f(self): setattr(self, name, 1)",
        "from megatron.core import A; x = A.y; parameter.tag = x",
        "from megatron_aro import config; config.x = 1",
    ],
)
def test_the_check_leaves_objects_alone(source):
    assert not Patches(ast.parse(source)).lines


# Whatever the syntax: what is another object after importing all of megatron_aro and registering.
DIFFERENCES = """
import importlib, inspect, sys
megatron, own = sys.argv[1].split(), sys.argv[2].split()

def names():
    modules = [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "megatron"]
    classes = {c for m in modules for c in vars(m).values()
               if inspect.isclass(c) and c.__module__.split(".")[0] == "megatron"}
    return {(m.__name__, n): v for m in modules for n, v in vars(m).items()} | {
        (f"{c.__module__}.{c.__qualname__}", n): v for c in classes for n, v in vars(c).items()
        if n != "_abc_impl"}

for name in megatron:
    importlib.import_module(name)
before = names()
for name in own:
    importlib.import_module(name)
sys.modules["megatron_aro"].register()
sys.modules["megatron_aro"].register()
after = names()
changed = {name for name, value in before.items() if value is not after.get(name)}
hooks = {tuple(f"{hook.module}.{hook.name}".rsplit(".", 1))
         for hook in sys.modules["megatron_aro.megatron.hooks"].HOOKS}
assert changed == hooks, changed ^ hooks
"""


def test_importing_and_registering_change_exactly_the_hooked_names():
    own = [".".join(("megatron_aro", *Path(f).with_suffix("").parts)) for f in FILES]
    own = [name.removesuffix(".__init__") for name in own]
    nodes = [node for path in FILES.values() for node in ast.walk(ast.parse(path.read_text()))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    megatron = sorted(name for name in modules if below(name, ("megatron",)))
    command = [sys.executable, "-W", "ignore", "-c", DIFFERENCES, " ".join(megatron), " ".join(own)]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
