# SPDX-License-Identifier: Apache-2.0
"""A patch that applies can still be wrong. Check what our lines use against the tree they land in, by syntax alone:

* every name they import from vllm, or read from an imported vllm module, exists (also inside functions);
* every plain name is bound somewhere, so an import that upstream removed shows;
* every call of a vLLM function, class or method binds to its signature;
* every `VLLM_*` variable they read is registered in vllm/envs.py;
* every file compiles.
"""
import ast
import builtins
import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from .git import Git
from .patchfile import parse_patch
from .signatures import bind_class, bind_function
from .symbols import Definition, Symbols, absolute_module, imported_names, stored_names
from .trees import DiskTree, GitTree

_BUILTINS = set(dir(builtins)) | {"__file__", "__name__", "__doc__", "__package__", "__spec__", "__path__", "__all__", "__class__", "WindowsError", "reveal_type"}


@dataclass(frozen=True)
class Finding:
    """One problem, printed as `path:line: why`."""

    path: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


def added_lines(git: Git, before: str, after: str) -> dict[str, set[int]]:
    """`path -> numbers of the lines` that `after` has and `before` has not, for Python files that still exist."""
    out = git.run("diff-tree", "-r", "-p", "--unified=0", "--no-renames", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/", before, after)
    if not out.strip():
        return {}
    patch = parse_patch(out, git.cwd)
    return {c.new: {n for h in c.hunks for n, _ in h.added()} for c in patch.changes if c.new and c.new.endswith(".py")}


def check(tree: GitTree | DiskTree, lines: dict[str, set[int]]) -> list[Finding]:
    """Findings for the given lines of the given files, in file order."""
    symbols = Symbols(tree)
    findings: list[Finding] = []
    for path, numbers in sorted(lines.items()):
        source = tree.read(path)
        if source is None:
            findings.append(Finding(path, 1, "the file is missing"))
            continue
        try:
            parsed = ast.parse(source)
            compile(source, path, "exec", dont_inherit=True)
        except SyntaxError as e:
            findings.append(Finding(path, e.lineno or 1, f"does not compile: {e.msg}"))
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        checker = _Checker(symbols, module, path, numbers, parsed)
        checker.run()
        findings += sorted(checker.findings, key=lambda f: f.line)
    return findings


def _near(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), 1)
    return f" (nearest: {close[0]})" if close else ""


class _Checker:
    """Walks one file with a stack of scopes (name -> Definition, or None for a local value)."""

    def __init__(self, symbols: Symbols, module: str, path: str, lines: set[int], tree: ast.Module) -> None:
        self.symbols = symbols
        self.module = module
        self.path = path
        self.lines = lines
        self.tree = tree
        self.is_package = path.endswith("/__init__.py")
        self.findings: list[Finding] = []
        own = symbols.module(module)
        self.scopes: list[dict[str, Definition | None]] = [{**own.type_only, **own.names} if own else {}]
        self.scopes[0] |= {n: None for n in _deep_globals(tree) if n not in self.scopes[0]}
        self.open = bool(own and own.stars)  # a star import: any name may come from there
        self.classes: list[ast.ClassDef] = []

    def run(self) -> None:
        for node in self.tree.body:
            self.visit(node)

    def ours(self, node: ast.AST) -> bool:
        return any(n in self.lines for n in range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def report(self, node: ast.AST, why: str) -> None:
        finding = Finding(self.path, node.lineno, why)
        if finding not in self.findings:
            self.findings.append(finding)

    # ---- scopes

    def find(self, name: str) -> tuple[bool, Definition | None]:
        for scope in reversed(self.scopes):
            if name in scope:
                return True, scope[name]
        return name in _BUILTINS or self.open, None

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            self._visit_function(node)
            return
        if isinstance(node, ast.ClassDef):
            for child in [*node.decorator_list, *node.bases, *node.keywords]:
                self.visit(child)
            self.classes.append(node)
            self.scopes.append({n: None for n in _bound_in(node)})
            for child in node.body:
                self.visit(child)
            self.scopes.pop()
            self.classes.pop()
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            self.scopes.append({n: None for n in stored_names(node)})
            for child in ast.iter_child_nodes(node):
                self.visit(child)
            self.scopes.pop()
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if self.ours(node):
                self._check_import(node)
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.lineno in self.lines and not self.find(node.id)[0]:
            self.report(node, f"the name {node.id!r} is not defined in this file")
        if isinstance(node, ast.Attribute) and self.ours(node):
            self._check_attribute(node)
        if isinstance(node, ast.Call) and self.ours(node):
            self._check_call(node)
            self._check_environment(node)
        if isinstance(node, ast.Subscript) and self.ours(node):
            self._check_environment(node)
        if isinstance(node, ast.Constant):
            return
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        for child in [*getattr(node, "decorator_list", []), *arguments.defaults, *(d for d in arguments.kw_defaults if d)]:
            self.visit(child)
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *([arguments.vararg] if arguments.vararg else []), *([arguments.kwarg] if arguments.kwarg else [])]
        for a in every:
            if a.annotation:
                self.visit(a.annotation)
        body = node.body if isinstance(node.body, list) else [node.body]
        scope: dict[str, Definition | None] = {a.arg: None for a in every}
        scope |= {n: None for n in _bound_in(node)}
        for child in ast.walk(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                scope |= imported_names(child, self.module, self.is_package)
        self.scopes.append(scope)
        for child in body:
            self.visit(child)
        self.scopes.pop()

    # ---- checks

    def _check_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm" and not self.symbols.exists(alias.name):
                    self.report(node, f"imports {alias.name}, which does not exist")
            return
        source = absolute_module(node, self.module, self.is_package)
        if source.split(".")[0] != "vllm":
            return
        if not self.symbols.exists(source):
            self.report(node, f"imports from {source}, which does not exist")
            return
        for alias in node.names:
            if alias.name != "*" and self.symbols.lookup(source, alias.name, type_only=True) is None:
                self.report(node, f"imports {alias.name} from {source}, which has no such name{_near(alias.name, self.symbols.all_names(source))}")

    def _module_of(self, node: ast.expr) -> str | None:
        """The vllm module that an expression names, None if it names none."""
        if isinstance(node, ast.Name):
            definition = self.find(node.id)[1]
            if definition is None or definition.kind != "import" or definition.module.split(".")[0] != "vllm":
                return None
            if definition.name is None:
                return definition.module
            inner = self.symbols.lookup(definition.module, definition.name, type_only=True)
            return inner[0] if inner and inner[1].kind == "import" and inner[1].name is None else None
        if isinstance(node, ast.Attribute) and (outer := self._module_of(node.value)):
            return f"{outer}.{node.attr}" if self.symbols.exists(f"{outer}.{node.attr}") else None
        return None

    def _check_attribute(self, node: ast.Attribute) -> None:
        module = self._module_of(node.value)
        if module and self.symbols.module(module) and isinstance(node.ctx, ast.Load) and self.symbols.lookup(module, node.attr) is None and not node.attr.startswith("__"):
            self.report(node, f"{module} has no name {node.attr!r}{_near(node.attr, self.symbols.all_names(module))}")

    def _resolve(self, node: ast.expr) -> tuple[str, Definition] | None:
        if isinstance(node, ast.Name):
            definition = self.find(node.id)[1]
            if definition is None:
                return None
            if definition.kind == "import":
                return self.symbols.lookup(definition.module, definition.name, type_only=True) if definition.name and definition.module.split(".")[0] == "vllm" else None
            return self.module, definition
        if isinstance(node, ast.Attribute) and (module := self._module_of(node.value)):
            return self.symbols.lookup(module, node.attr)
        return None

    def _check_call(self, node: ast.Call) -> None:
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func  # kernel[grid](...)
        shown = ast.unparse(function)
        if isinstance(function, ast.Attribute) and self.classes and self._is_self(function.value):
            if method := self._method(function):
                why = bind_function(method, node, method=True)
                if why:
                    self.report(node, f"the call of {shown} does not bind: it {why}")
            return
        found = self._resolve(function)
        if found is None:
            return
        module, definition = found
        if isinstance(definition.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            why = bind_function(definition.node, node, method=False)
        elif isinstance(definition.node, ast.ClassDef):
            why = bind_class(self.symbols, module, definition.node, node)
        else:
            return
        if why:
            self.report(node, f"the call of {shown} does not bind: it {why}")

    @staticmethod
    def _is_self(node: ast.expr) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            return True
        return isinstance(node, ast.Name) and node.id in ("self", "cls")

    def _method(self, function: ast.Attribute) -> ast.FunctionDef | None:
        chain, _ = self.symbols.class_chain(self.module, self.classes[-1])
        if isinstance(function.value, ast.Call):
            chain = chain[1:]
        for _, owner in chain:
            stored = {t.attr for t in ast.walk(owner) if isinstance(t, ast.Attribute) and isinstance(t.ctx, ast.Store)}
            if function.attr in stored:
                return None  # an attribute of that name may hold anything
            for item in owner.body:
                if isinstance(item, ast.FunctionDef) and item.name == function.attr:
                    return item
                if function.attr in (stored_names(item) if isinstance(item, (ast.Assign, ast.AnnAssign)) else ()):
                    return None
        return None

    def _check_environment(self, node: ast.Call | ast.Subscript) -> None:
        """os.environ["VLLM_X"], os.environ.get("VLLM_X"), os.getenv("VLLM_X"): registered?"""
        place = ast.unparse(node.value if isinstance(node, ast.Subscript) else node.func)
        if place not in ("os.environ", "os.environ.get", "os.getenv", "environ.get", "getenv", "environ"):
            return
        key = node.slice if isinstance(node, ast.Subscript) else (node.args[0] if node.args else None)
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.startswith("VLLM_") and key.value not in self.symbols.env_names():
            self.report(node, f"reads {key.value}, which vllm/envs.py does not register{_near(key.value, self.symbols.env_names())}")


def _bound_in(node: ast.AST) -> set[str]:
    """Every name bound anywhere inside `node`: assignments, definitions, imports. Wider than a scope, so never a false finding."""
    found = stored_names(node)
    for child in ast.walk(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child is not node:
            found.add(child.name)
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            found |= {(a.asname or a.name).split(".")[0] for a in child.names}
        elif hasattr(ast, "TypeVar") and isinstance(child, ast.TypeVar):
            found.add(child.name)
    return found


def _deep_globals(tree: ast.Module) -> set[str]:
    """Names that a `global` statement in some function binds in the module."""
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
