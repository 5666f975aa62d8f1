# SPDX-License-Identifier: Apache-2.0
"""What the modules of a vLLM tree define, read with `ast` and never imported: names, signatures, class hierarchies."""
import ast
from dataclasses import dataclass, field

from .trees import DiskTree, GitTree


@dataclass
class Definition:
    """`kind`: function, class, import (of `name` from `module`; `name` None: the module itself) or value."""

    kind: str
    node: ast.AST | None = None
    module: str = ""
    name: str | None = None


@dataclass
class Module:
    """`names`: bound when the module runs. `type_only`: bound under TYPE_CHECKING. `dynamic`: has __getattr__; then `dict_keys` (of its dict literals) count as names."""

    name: str
    path: str
    is_package: bool
    tree: ast.Module
    names: dict[str, Definition] = field(default_factory=dict)
    type_only: dict[str, Definition] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    dynamic: bool = False
    dict_keys: set[str] = field(default_factory=set)


def made_by_build(module: str) -> bool:
    """Whether the source build compiles or fetches this module, so that a source tree does not have it."""
    parts = module.split(".")
    return parts[:2] in (["vllm", "vllm_flash_attn"], ["vllm", "third_party"], ["vllm", "spinloop"], ["vllm", "_version"]) or any(p.startswith("_") and p.endswith("_C") for p in parts)


def absolute_module(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The absolute name of the module that an ImportFrom names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def imported_names(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> dict[str, Definition]:
    """`local name -> definition` of one import statement; a star is left out."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name.split(".")[0]: Definition("import", node, a.name if a.asname else a.name.split(".")[0]) for a in node.names}
    source = absolute_module(node, module, is_package)
    return {a.asname or a.name: Definition("import", node, source, a.name) for a in node.names if a.name != "*"}


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")


def stored_names(node: ast.AST) -> set[str]:
    """Every name that an assignment, loop, with, except, walrus or pattern in `node` binds."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, (ast.Store, ast.Del)):
            found.add(child.id)
        elif isinstance(child, ast.ExceptHandler) and child.name or isinstance(child, (ast.MatchAs, ast.MatchStar)) and child.name:
            found.add(child.name)
        elif isinstance(child, ast.MatchMapping) and child.rest:
            found.add(child.rest)
    return found


class Symbols:
    """The modules below `vllm` of one tree, parsed on demand."""

    def __init__(self, tree: GitTree | DiskTree) -> None:
        self._tree = tree
        self._modules: dict[str, Module | None] = {}

    def path_of(self, module: str) -> str | None:
        """The file of a module, None if the tree has none (a namespace package has none either)."""
        stem = module.replace(".", "/")
        return next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if self._tree.blob(p)), None)

    def exists(self, module: str) -> bool:
        return self.path_of(module) is not None or made_by_build(module) or self._tree.has_folder(module.replace(".", "/"))

    def module(self, name: str) -> Module | None:
        """The parsed module; None if there is none or it does not parse."""
        if name not in self._modules:
            path = self.path_of(name)
            parsed = None
            if path:
                try:
                    parsed = _read_module(name, path, ast.parse(self._tree.read(path)))
                except SyntaxError:
                    parsed = None
            self._modules[name] = parsed
        return self._modules[name]

    def lookup(self, module: str, name: str, *, type_only: bool = False, depth: int = 0) -> tuple[str, Definition] | None:
        """(module that really defines it, definition) of `name` in `module`, through re-exports; None if it does not exist.

        A name that comes from outside vllm is a value. `type_only`: names bound under TYPE_CHECKING count too.
        """
        if depth > 20:
            return module, Definition("value")
        found = self.module(module)
        if found is None:
            if made_by_build(module):
                return module, Definition("value")
            if self.exists(f"{module}.{name}"):
                return f"{module}.{name}", Definition("import", None, f"{module}.{name}")
            return (module, Definition("value")) if self.path_of(module) else None
        definition = found.names.get(name) or (found.type_only.get(name) if type_only else None)
        if definition is None:
            if self.exists(f"{module}.{name}"):
                return f"{module}.{name}", Definition("import", None, f"{module}.{name}")
            for star in found.stars:
                if not star.startswith("vllm"):
                    return module, Definition("value")
                if inner := self.lookup(star, name, depth=depth + 1):
                    return inner
            if found.dynamic and (name in found.dict_keys):
                return module, Definition("value")
            return None
        if definition.kind != "import" or definition.module.split(".")[0] != "vllm":
            return module, definition if definition.kind != "import" else Definition("value")
        if definition.name is None:
            return definition.module, definition
        return self.lookup(definition.module, definition.name, type_only=type_only, depth=depth + 1)

    def all_names(self, module: str) -> list[str]:
        """Names of a module, for suggestions."""
        found = self.module(module)
        return sorted({*found.names, *found.dict_keys}) if found else []

    def env_names(self) -> set[str]:
        """The variables that vllm/envs.py registers."""
        found = self.module("vllm.envs")
        return found.dict_keys if found else set()

    def class_chain(self, module: str, node: ast.ClassDef, depth: int = 0) -> tuple[list[tuple[str, ast.ClassDef]], bool]:
        """(the class and its vllm bases in lookup order, whether every base is known)."""
        chain, whole = [(module, node)], not node.keywords
        for base in node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name) and base.id in ("object", "Generic", "ABC", "Protocol"):
                continue
            found = self.lookup(module, base.id, type_only=True) if isinstance(base, ast.Name) else None
            if found is None or not isinstance(found[1].node, ast.ClassDef) or depth > 10:
                whole = False
                continue
            inner, inner_whole = self.class_chain(found[0], found[1].node, depth + 1)
            chain += inner
            whole = whole and inner_whole
        return chain, whole


def _read_module(name: str, path: str, tree: ast.Module) -> Module:
    module = Module(name, path, path.endswith("/__init__.py"), tree)

    def visit(statements: list[ast.stmt], names: dict[str, Definition]) -> None:
        for node in statements:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names[node.name] = Definition("function", node)
                if node.name == "__getattr__":
                    module.dynamic = True
            elif isinstance(node, ast.ClassDef):
                names[node.name] = Definition("class", node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
                    module.stars.append(absolute_module(node, name, module.is_package))
                names.update(imported_names(node, name, module.is_package))
            elif isinstance(node, ast.If):
                visit(node.body, module.type_only if _is_type_checking(node.test) else names)
                visit(node.orelse, names)
            elif isinstance(node, (ast.Try, ast.With, ast.For, ast.While)):
                for stored in stored_names(node):
                    names.setdefault(stored, Definition("value"))
                for body in ("body", "orelse", "finalbody"):
                    visit(getattr(node, body, []), names)
                for handler in getattr(node, "handlers", []):
                    fallback: dict[str, Definition] = {}
                    visit(handler.body, fallback)
                    names |= {n: Definition("value") for n in fallback}  # which of the two is bound depends on the run
            else:
                for stored in stored_names(node):
                    names[stored] = Definition("value", node)
                value = getattr(node, "value", None)
                if isinstance(value, ast.Dict):
                    module.dict_keys |= {k.value for k in value.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}

    visit(tree.body, module.names)
    return module
