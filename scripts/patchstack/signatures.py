# SPDX-License-Identifier: Apache-2.0
"""Does a call bind to a definition? Both are syntax trees; what cannot be known is never a finding."""
import ast

from .symbols import Symbols

# Decorators that leave the signature as written.
_TRANSPARENT = {"cache", "lru_cache", "contextmanager", "asynccontextmanager", "staticmethod", "classmethod", "no_grad", "inference_mode", "jit",
                "override", "final", "deprecated", "abstractmethod", "instrument", "torch_profiler"}  # fmt: skip
_LAUNCH = {"num_warps", "num_stages", "num_ctas", "grid", "warmup", "launch_pdl", "launch_cooperative_grid", "maxnreg", "waves_per_eu",
           "matrix_instr_nonkdim", "kpack"}  # fmt: skip


def decorator_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {decorator_name(d) for d in node.decorator_list}


def bind_arguments(arguments: ast.arguments, call: ast.Call, *, skip: int, extra_keywords: frozenset[str] = frozenset()) -> str | None:
    """Why `call` does not bind to `arguments`, whose first `skip` (self) are filled already; None if it does or cannot be told."""
    positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    required = positional[: len(positional) - len(arguments.defaults)][skip:]
    only_positional = {a.arg for a in arguments.posonlyargs}
    positional = positional[skip:]
    keyword_only = {a.arg: default is None for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    given = {k.arg for k in call.keywords if k.arg}
    known = (set(positional) - only_positional) | keyword_only.keys() | extra_keywords
    if not arguments.kwarg and (unknown := sorted(given - known)):
        return f"has no parameter {unknown[0]!r} (it takes {', '.join([*positional, *keyword_only]) or 'none'})"
    starred = any(isinstance(a, ast.Starred) for a in call.args)
    count = sum(not isinstance(a, ast.Starred) for a in call.args)
    if not arguments.vararg and count > len(positional):
        return f"takes {len(positional)} positional arguments, {count} are given"
    if twice := sorted(given & set(positional[:count])):
        return f"gets {twice[0]!r} twice"
    if starred or any(k.arg is None for k in call.keywords):
        return None
    missing = [n for n in required[count:] if n not in given] + [n for n, needed in keyword_only.items() if needed and n not in given]
    return f"needs {missing[0]!r}, which is not given" if missing else None


def bind_function(node: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call, *, method: bool) -> str | None:
    """`method`: called on an instance or class, which fills the first parameter."""
    found = decorators(node)
    if found - _TRANSPARENT:
        return None
    skip = 1 if method and "staticmethod" not in found else 0
    return bind_arguments(node.args, call, skip=skip, extra_keywords=frozenset(_LAUNCH) if "jit" in found else frozenset())


def bind_class(symbols: Symbols, module: str, node: ast.ClassDef, call: ast.Call) -> str | None:
    """The constructor: __init__ or __new__ of the class or a base, else the fields of a dataclass or NamedTuple."""
    chain, whole = symbols.class_chain(module, node)
    if any(k.arg == "metaclass" for k in node.keywords) or decorators(node) - {"dataclass", "final"}:
        return None
    for _, owner in chain:
        for name in ("__init__", "__new__"):
            for item in owner.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return None if decorators(item) - _TRANSPARENT else bind_arguments(item.args, call, skip=1)
        if "dataclass" in decorators(owner) or any(isinstance(b, ast.Name) and b.id == "NamedTuple" for b in owner.bases):
            return bind_arguments(_fields(chain), call, skip=0) if whole or len(chain) == 1 else None
    return bind_arguments(ast.arguments([], [], None, [], [], None, []), call, skip=0) if whole else None


def _fields(chain: list[tuple[str, ast.ClassDef]]) -> ast.arguments:
    """The constructor that a dataclass writes, base classes first."""
    positional: dict[str, bool] = {}
    keyword: dict[str, bool] = {}
    for _, owner in reversed(chain):
        all_keyword = any(isinstance(d, ast.Call) and any(k.arg == "kw_only" and getattr(k.value, "value", False) for k in d.keywords) for d in owner.decorator_list)
        for item in owner.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            annotation = ast.unparse(item.annotation)
            if "ClassVar" in annotation:
                continue
            if annotation.endswith("KW_ONLY"):
                all_keyword = True
                continue
            options = {k.arg: k.value for k in item.value.keywords} if isinstance(item.value, ast.Call) and decorator_name(item.value) == "field" else None
            if options and isinstance(options.get("init"), ast.Constant) and options["init"].value is False:
                continue
            optional = item.value is not None and (options is None or "default" in options or "default_factory" in options)
            (keyword if all_keyword else positional)[item.target.id] = optional
    args = [ast.arg(n) for n in positional]
    defaults = [ast.Constant(None) for optional in positional.values() if optional]
    return ast.arguments([], args, None, [ast.arg(n) for n in keyword], [ast.Constant(0) if o else None for o in keyword.values()], None, defaults)
