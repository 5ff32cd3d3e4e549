"""The house rules, held by a test: sizes, names, direction of imports, what must not be said.

Each rule is a function from a file to the lines that break it, tried on bad snippets below: a rule
that cannot fail is no rule.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FUNCTION_LINES = 70
FILE_LINES = 500
LINE_LENGTH = 100

# Imports run one way: a module may import from its own layer and from those before it.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "host", "types", "units"}),
    frozenset(
        {"admission", "cost", "device_config", "health", "metrics", "placement"}
        | {"plan", "pool", "prefix", "recency", "slots", "stalls", "table"}
    ),
    frozenset(
        {"config", "container", "environment", "faults", "layout", "medium", "native", "weights"}
    ),
    frozenset({"devices"}),
    frozenset(
        {"dataplane", "inspection", "jobs", "loads", "orchestrator", "probe", "probe_stream"}
        | {"reporter", "restore", "spills", "stores", "trials"}
    ),
    frozenset({"cli", "sim"}),
    frozenset({"connectors"}),
)
# Decides and does no I/O; the simulator runs it on a clock of its own.
CONTROL_PLANE = frozenset(
    {"admission", "cost", "health", "loads", "orchestrator", "placement", "pool", "prefix"}
    | {"recency", "restore", "spills", "stores", "table"}
)
# Does I/O and decides nothing.
DATA_PLANE = frozenset(
    {
        "container",
        "dataplane",
        "devices",
        "jobs",
        "layout",
        "medium",
        "native",
        "probe",
        "probe_stream",
    }
)
IMPURE_MODULES = frozenset(
    {"asyncio", "datetime", "io", "mmap", "multiprocessing", "os", "pathlib", "random", "socket"}
    | {"subprocess", "tempfile", "threading", "time"}
)
ENGINES = frozenset({"lmcache", "torch", "vllm"})
ENGINE_FOLDERS = ("connectors/", "bench/", "tests/")

# Put together here, so that this file does not say what it forbids.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"(?<![\w.$}-])/" + r"work/",
            r"(?<![\w.$}-])/tmp/" + r"w\b",
            r"\bpypi" + r"\.org",
            r"python" + r"hosted\.org",
            r"(deb|security)" + r"\.debian\.org",
            r"registry\.npm" + r"js",
        )
    )
)
README_SECTIONS = (r"set.?up|install|quick.?start", r"limit|not yet|gaps", r"licen[cs]e")


@dataclass(frozen=True)
class Source:
    """A file as the rules see it: its path inside the repository, and its text."""

    path: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_c(self) -> bool:
        return self.path.endswith((".c", ".h"))

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def module(self) -> str:
        """The part of kvpool that it belongs to: "table", "devices", "connectors"; else ""."""
        first, *rest = self.path.removesuffix(".py").split("/")
        if first == "connectors" or not rest:
            return first if first == "connectors" else ""
        return rest[0] if first == "kvpool" else ""


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


# ---- the rules ----

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def functions_are_short(source: Source) -> Iterator[str]:
    """A function has at most 70 lines."""
    for name, line, length in [*_python_functions(source), *_c_functions(source)]:
        if length > FUNCTION_LINES:
            yield f"{line}: {name} has {length} lines, allowed are {FUNCTION_LINES}"


def _python_functions(source: Source) -> Iterator[tuple[str, int, int]]:
    if source.is_python:
        for node in ast.walk(source.tree):
            if isinstance(node, FunctionNode):
                assert node.end_lineno is not None
                yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def _c_functions(source: Source) -> Iterator[tuple[str, int, int]]:
    """A function's signature starts a line, as nothing in its body does, and it ends with "}"."""
    start, signature = 0, ""
    for number, line in enumerate(source.text.splitlines() if source.is_c else (), 1):
        if line == "}":
            yield signature, start, number - start + 1
        elif re.match(r"[A-Za-z_].*[^:]$", line):
            start, signature = number, line.rstrip("{ ")


def files_are_short(source: Source) -> Iterator[str]:
    """A source file has at most 500 lines, of at most 100 characters."""
    if not (source.is_python or source.is_c):
        return
    lines = source.text.splitlines()
    if len(lines) > FILE_LINES:
        yield f"{len(lines)} lines, allowed are {FILE_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH:
            yield f"{number}: {len(line)} characters, allowed are {LINE_LENGTH}"


def names_say_something(source: Source) -> Iterator[str]:
    """No file is called utils, nothing is called `_v2`."""
    name = source.path.rsplit("/", 1)[-1]
    if name.lower().startswith("utils") or "utils" in source.path.split("/")[:-1]:
        yield "say what is in it instead of `utils`"
    if re.search(r"_v\d", name):
        yield "say what is different instead of a number"
    for node in ast.walk(source.tree) if source.is_python else ():
        if isinstance(node, FunctionNode | ast.ClassDef) and re.search(r"_?[vV]\d+$", node.name):
            yield f"{node.lineno}: {node.name}: say what is different instead of a number"


def imports_run_one_way(source: Source) -> Iterator[str]:
    """kvpool imports from its own layer and below; control and data plane meet in plan.py."""
    if not source.module or source.path == "kvpool/__init__.py":
        return
    own = _layer(source.module)
    if own is None:
        yield f"{source.module} is in no layer: put it into LAYERS of tests/house"
        return
    for line, module in _kvpool_imports(source):
        layer = _layer(module)
        if layer is None or layer > own:
            yield f"{line}: {source.module} may not import {module}, which is above it"
        for plane, other in ((CONTROL_PLANE, DATA_PLANE), (DATA_PLANE, CONTROL_PLANE)):
            if source.module in plane and module in other:
                yield f"{line}: {source.module} may not import {module}, of the other plane"


def _layer(module: str) -> int | None:
    return next((i for i, modules in enumerate(LAYERS) if module in modules), None)


def _kvpool_imports(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, part of kvpool) for each import of it."""
    for line, name in _imports(source):
        first, _, rest = name.partition(".")
        if first == "kvpool" and rest and not rest.startswith("_"):
            yield line, rest.split(".")[0]


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for each name that is imported, `from` imports name by name."""
    package = source.path.split("/")[:-1]
    if package[:1] == ["connectors"]:
        package = ["kvpool", *package]
    for node in ast.walk(source.tree) if source.is_python else ():
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def engines_stay_outside(source: Source) -> Iterator[str]:
    """Only connectors/ (and bench and tests) import vLLM, torch or LMCache."""
    if not source.path.startswith(ENGINE_FOLDERS):
        for line, name in _imports(source):
            if name.split(".")[0] in ENGINES:
                yield f"{line}: imports {name.split('.')[0]}, which only connectors/ may"


def policies_are_pure(source: Source) -> Iterator[str]:
    """The control plane has no I/O, no lock, no clock and no chance."""
    if source.path.startswith("kvpool/") and source.module in CONTROL_PLANE:
        for line, name in _imports(source):
            if name.split(".")[0] in IMPURE_MODULES:
                yield f"{line}: imports {name.split('.')[0]}"


def public_names_have_docstrings(source: Source) -> Iterator[str]:
    """Every module, public function and public class of kvpool says what it is."""
    if not (source.is_python and source.path.startswith(("kvpool/", "connectors/"))):
        return
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield "1: the module has no docstring"
    for node in source.tree.body:
        is_public = isinstance(node, FunctionNode | ast.ClassDef) and not node.name.startswith("_")
        if is_public and not ast.get_docstring(node):
            yield f"{node.lineno}: {node.name} has no docstring"


def no_test_sleeps(source: Source) -> Iterator[str]:
    """No test sleeps: it waits for what it waits for."""
    if not (source.is_python and source.path.startswith("tests/")):
        return
    for line, name in _imports(source):
        if name == "time.sleep":
            yield f"{line}: imports sleep"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
            yield f"{node.lineno}: sleeps"


def nothing_unspeakable(source: Source) -> Iterator[str]:
    """No path of a developer's machine, no host of a package registry."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := FORBIDDEN.search(line):
            yield f"{number}: says {found.group()!r}"


def c_files_name_their_licence(source: Source) -> Iterator[str]:
    """The first line of a C file is its licence."""
    if source.is_c and "SPDX-License-Identifier: Apache-2.0" not in source.text.partition("\n")[0]:
        yield "1: no SPDX-License-Identifier"


def readme_has_its_sections(source: Source) -> Iterator[str]:
    """README tells how to set up, what the limits are and under which licence."""
    if source.path == "README.md":
        headings = "\n".join(re.findall(r"^#+ (.*)$", source.text, re.MULTILINE))
        for section in README_SECTIONS:
            if not re.search(section, headings, re.IGNORECASE):
                yield f"no section like {section!r}"


def documents_name_what_exists(source: Source) -> Iterator[str]:
    """Make targets and relative links in documents exist."""
    if not source.path.endswith(".md"):
        return
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    folder = (ROOT / source.path).parent
    for number, line in enumerate(source.text.splitlines(), 1):
        for target in re.findall(r"(?:^|`|\$ )make ([a-z]+)", line):
            if target not in targets:
                yield f"{number}: the Makefile has no target {target}"
        for link in re.findall(r"\]\(([^)#\s]+)", line):
            if "://" not in link and not (folder / link).exists():
                yield f"{number}: links to {link}, which does not exist"


Rule = Callable[[Source], Iterator[str]]
RULES: tuple[Rule, ...] = (
    functions_are_short,
    files_are_short,
    names_say_something,
    imports_run_one_way,
    engines_stay_outside,
    policies_are_pure,
    public_names_have_docstrings,
    no_test_sleeps,
    nothing_unspeakable,
    c_files_name_their_licence,
    readme_has_its_sections,
    documents_name_what_exists,
)

# ---- the rules hold ----


def _listed() -> list[str]:
    """Tracked files and new ones that git does not ignore; all files where this is no clone."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.splitlines()
    hidden = ("build", "dist", "__pycache__")
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
    return [
        str(path)
        for path in paths
        if not any(part in hidden or part.startswith(".") for part in path.parts)
    ]


@cache
def _sources() -> tuple[Source, ...]:
    sources = []
    for name in _listed():
        path = ROOT / name
        try:
            text = path.read_text() if path.is_file() else None
        except UnicodeDecodeError:
            continue  # a picture
        if text is not None:
            sources.append(Source(name, text))
    return tuple(sources)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    assert len(_sources()) > 10
    broken = [f"{source.path}:{line}" for source in _sources() for line in rule(source)]
    assert not broken, "\n" + "\n".join(broken)


def test_nothing_imports_in_a_circle() -> None:
    imported: dict[str, set[str]] = {}
    for source in _sources():
        if source.path.startswith("kvpool/") and source.module not in ("", "__init__"):
            modules = {module for _, module in _kvpool_imports(source)} - {source.module}
            imported.setdefault(source.module, set()).update(modules)
    assert not _circle(imported)


def _circle(imported: dict[str, set[str]]) -> list[str]:
    """Return the modules that are left when all that import none of the rest are taken away."""
    left = dict(imported)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


# ---- the rules can fail ----

LONG_PYTHON = "def walk() -> None:\n" + "    pass\n" * 70
LONG_METHOD = "    async def walk(self) -> None:\n" + "        pass\n" * 70
LONG_C = "int walk(int a,\n         int b) {\n" + "    a++;\n" * 68 + "}\n"
BAD: tuple[tuple[Rule, str, str], ...] = (
    (functions_are_short, "kvpool/table.py", LONG_PYTHON),
    (functions_are_short, "kvpool/table.py", "class A:\n" + LONG_METHOD),
    (functions_are_short, "native/a.c", "int a(void) { return 1; }\n" + LONG_C),
    (files_are_short, "bench/a.py", "x = 1\n" * 501),
    (files_are_short, "native/a.h", "int a;\n" * 501),
    (files_are_short, "native/a.c", "// " + "x" * 98),
    (names_say_something, "kvpool/utils.py", ""),
    (names_say_something, "kvpool/utils/a.py", ""),
    (names_say_something, "kvpool/table_v2.py", ""),
    (names_say_something, "kvpool/table.py", "def look_up_v2(): ..."),
    (names_say_something, "kvpool/table.py", "class TableV2: ..."),
    (imports_run_one_way, "kvpool/types.py", "from kvpool.table import Table"),
    (imports_run_one_way, "kvpool/table.py", "from kvpool import native"),
    (imports_run_one_way, "kvpool/table.py", "import kvpool.connectors.vllm"),
    (imports_run_one_way, "kvpool/devices/dram.py", "from ..dataplane import DataPlane"),
    (imports_run_one_way, "kvpool/orchestrator.py", "from kvpool.devices.base import Device"),
    (imports_run_one_way, "kvpool/dataplane.py", "def f():\n    from kvpool.table import Table"),
    (imports_run_one_way, "kvpool/cli.py", "from kvpool import connectors"),
    (imports_run_one_way, "kvpool/newcomer.py", ""),
    (engines_stay_outside, "kvpool/cli.py", "def f():\n    import torch"),
    (engines_stay_outside, "kvpool/cli.py", "from vllm.config import VllmConfig"),
    (engines_stay_outside, "deploy/a.py", "import lmcache.v1"),
    (policies_are_pure, "kvpool/placement.py", "import time"),
    (policies_are_pure, "kvpool/table.py", "from threading import Lock"),
    (public_names_have_docstrings, "kvpool/table.py", '"""A."""\ndef look_up(): ...'),
    (public_names_have_docstrings, "kvpool/table.py", '"""A."""\nclass Table: ...'),
    (public_names_have_docstrings, "kvpool/table.py", "x = 1"),
    (no_test_sleeps, "tests/a.py", "import time\ntime.sleep(1)"),
    (no_test_sleeps, "tests/a.py", "from time import sleep"),
    (nothing_unspeakable, "README.md", "see /" + "work/shared"),
    (nothing_unspeakable, "deploy/setup.sh", "cd /tmp/" + "w/fresh"),
    (nothing_unspeakable, "Makefile", "https://pypi" + ".org/simple"),
    (c_files_name_their_licence, "native/a.c", "#include <stdio.h>\n"),
    (readme_has_its_sections, "README.md", "# kvpool\n## Limits\n## Licence\nset up\n"),
    (documents_name_what_exists, "README.md", "`make haste`"),
    (documents_name_what_exists, "README.md", "[a](nowhere/to.md)"),
)
GOOD: tuple[tuple[Rule, str, str], ...] = (
    (functions_are_short, "kvpool/table.py", LONG_PYTHON.replace("    pass\n", "", 1)),
    (functions_are_short, "native/a.c", LONG_C.replace("    a++;\n", "", 1)),
    (functions_are_short, "native/a.h", "typedef struct {\n" + "    int a;\n" * 80 + "} a;\n"),
    (files_are_short, "bench/a.py", "x = 1\n" * 500),
    (imports_run_one_way, "kvpool/table.py", "from kvpool.types import Key"),
    (imports_run_one_way, "kvpool/devices/dram.py", "from kvpool.devices.base import Device"),
    (imports_run_one_way, "connectors/vllm/worker.py", "from .spec import A\nimport kvpool.types"),
    (engines_stay_outside, "connectors/vllm/worker.py", "import torch"),
    (policies_are_pure, "kvpool/dataplane.py", "import time"),
    (public_names_have_docstrings, "kvpool/table.py", '"""A."""\ndef _look_up(): ...'),
    (no_test_sleeps, "tests/a.py", "time.monotonic()"),
    (nothing_unspeakable, "README.md", "build/" + "work/x and $HOME/" + "work/"),
    (documents_name_what_exists, "README.md", "`make test`, [a](LICENSE), [b](https://a.b/c)"),
    (readme_has_its_sections, "README.md", "# kvpool\n## Set-up\n## Limits\n## Licence\n"),
)


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_rule_sees_what_breaks_it(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_rule_lets_pass_what_keeps_it(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Source(path, text)))


def test_every_rule_was_seen_to_fail() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_a_circle_is_seen() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b", "types"}, "types": set()}) == ["a", "b", "c"]
    assert not _circle({"a": {"b", "c"}, "b": {"c"}, "c": {"json"}})
