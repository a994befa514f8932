"""Every systematic fault of a module: each place where an operator applies to its syntax tree.

Faults lie inside of functions.  A fault is known by its file and its number there, so it is the
same in every process as long as the file is.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / "impls" / "reference"
#: What a planted module calls to know whether a statement comes for the second time in its thread.
SECOND_TIME = "_comes_for_the_second_time"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Words that name an axis of the mesh, or how numbers are reduced; each becomes the next.
_CYCLES = (("replicate", "shard", "tensor", "pipe"), ("sum", "max"))
#: Whose value stands for that of the tensor itself: without them memory is shared, or kept.
_COPIES = {"clone", "contiguous", "detach"}
#: Arguments that say with whom, how or when: without them the default does.
_MANNERS = {"op", "root", "source", "destination", "dtype", "device", "non_blocking", "tag"}
_OPPOSED: Sequence[tuple[type[ast.cmpop], type[ast.cmpop]]] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
    *((ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
)
_COMPARED = {one: other for pair in _OPPOSED for one, other in (pair, pair[::-1])}
#: Changes the tree that it was made for.
Apply = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """Fault ``number`` of ``file`` (relative to ``impls/reference``).

    ``function``: the qualified name of the outermost function around ``line``; ``before`` and
    ``after``: the source of what changes.
    """

    file: str
    number: int
    function: str
    line: int
    operator: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """Its id: ``ddp.py#12``."""
        return f"{self.file}#{self.number}"

    def diff(self) -> str:
        """The place and the change of the fault, in three lines."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line} ({self.operator})\n- {before}\n+ {after}"


@functools.cache
def faults() -> Sequence[Fault]:
    """All of ``impls/reference``, by file and place."""
    return [fault for path in sorted(ROOT.rglob("*.py")) for fault in of_file(path)]


def of_file(path: Path) -> list[Fault]:
    """The faults of one file."""
    text = path.read_text(encoding="utf-8")
    file = str(path.relative_to(ROOT))
    return [fault for fault, _ in _sites(ast.parse(text), file)]


def planted_code(file: str, number: int) -> tuple[Fault, ast.Module]:
    """Fault ``number`` of ``file``, and the tree of the file with the fault.

    :raises LookupError: the file has fewer.
    """
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for fault, apply in _sites(tree, file):
        if fault.number == number:
            apply()
            return fault, ast.fix_missing_locations(tree)
    raise LookupError(f"{file} has no fault {number}")


def _sites(tree: ast.Module, file: str) -> Iterator[tuple[Fault, Apply]]:
    number = 0
    for name, function in _outermost(tree, ""):
        for operator, node, after, apply in _of_function(function):
            before = ast.unparse(node)
            after_text = after if isinstance(after, str) else ast.unparse(after)
            if before != after_text:
                yield Fault(file, number, name, node.lineno, operator, before, after_text), apply
                number += 1


def _outermost(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and methods of its classes, by qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _outermost(child, f"{prefix}{child.name}.")


#: Operator, the node that it changes, what that becomes (as text where it is no node).
Site = tuple[str, ast.stmt | ast.expr, ast.AST | str, Apply]


def _of_function(function: ast.AST) -> Iterator[Site]:
    for node in _without_errors(function):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from _of_body(value)
        if isinstance(node, _FUNCTIONS):
            continue
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and not _is_annotation(node, field):
                yield from _of_expression(value, functools.partial(setattr, node, field))
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, ast.expr):
                        yield from _of_expression(item, functools.partial(value.__setitem__, index))


def _without_errors(function: ast.AST) -> Iterator[ast.AST]:
    """Every node except those of a ``raise``, whose text changes no number.

    Defaults are not inside: they are made where the function is.
    """
    nodes = [function]
    for node in nodes:
        yield node
        children = node.body if node is function else ast.iter_child_nodes(node)  # type: ignore[attr-defined]
        nodes += [child for child in children if not isinstance(child, ast.Raise)]


def _is_annotation(node: ast.AST, field: str) -> bool:
    is_text = isinstance(node, ast.JoinedStr | ast.FormattedValue)
    return is_text or field in ("annotation", "returns")


# --------------------------------------------------------------------------------- statements


def _of_body(body: list[ast.stmt]) -> Iterator[Site]:
    for index, statement in enumerate(body):
        put = functools.partial(body.__setitem__, index)
        if _acts(statement):
            source = ast.unparse(statement)
            nothing = ast.copy_location(_nothing(statement), statement)
            yield "drop", statement, "pass", functools.partial(put, nothing)
            guarded = _once_skipped(statement)
            yield "skip once", statement, guarded, functools.partial(put, guarded)
            if isinstance(statement, ast.Expr):
                twice = functools.partial(body.insert, index, statement)
                yield "twice", statement, f"{source}; {source}", twice
            if index + 1 < len(body) and _acts(body[index + 1]):
                swap = functools.partial(_swap, body, index)
                yield "move", statement, f"{ast.unparse(body[index + 1])}; {source}", swap
        if isinstance(statement, ast.For):
            yield from _of_loop(statement)


def _nothing(statement: ast.stmt) -> ast.stmt:
    """``pass``; for a call of ``super()``, the class, whose cell the function must keep."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return ast.Expr(ast.Name("__class__", ast.Load())) if "super" in names else ast.Pass()


def _acts(statement: ast.stmt) -> bool:
    """A call for its effect, or an assignment to state that outlives the function."""
    match statement:
        case ast.Expr(ast.Call()) | ast.AugAssign():
            return True
        case ast.Assign(targets):
            return any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
    return False


def _once_skipped(statement: ast.stmt) -> ast.If:
    """The statement without its second execution: one step, or one micro-batch."""
    place = ast.Constant(f"{statement.lineno}:{statement.col_offset}")
    asked = ast.Call(ast.Name(SECOND_TIME, ast.Load()), [place], [])
    guard = ast.If(ast.UnaryOp(ast.Not(), asked), [statement], [])
    return ast.copy_location(guard, statement)


def _swap(body: list[ast.stmt], index: int) -> None:
    body[index], body[index + 1] = body[index + 1], body[index]


def _of_loop(loop: ast.For) -> Iterator[Site]:
    """The loop without its last iteration, and without its first."""
    for some in (ast.Slice(None, ast.Constant(-1)), ast.Slice(ast.Constant(1))):
        every = ast.Call(ast.Name("list", ast.Load()), [loop.iter], [])
        fewer = ast.copy_location(ast.Subscript(every, some, ast.Load()), loop.iter)
        yield "turns", loop.iter, fewer, functools.partial(setattr, loop, "iter", fewer)


# -------------------------------------------------------------------------------- expressions


def _of_expression(node: ast.expr, put: Callable[[ast.expr], None]) -> Iterator[Site]:
    def other(operator: str, changed: ast.expr) -> Site:
        changed = ast.copy_location(changed, node)
        return operator, node, changed, functools.partial(put, changed)

    match node:
        case ast.Call():
            yield from _of_call(node, other)
        case ast.Compare(left, [kind], [right]) if type(kind) in _COMPARED:
            yield other("compare", ast.Compare(left, [_COMPARED[type(kind)]()], [right]))
        case ast.BinOp(left, ast.Mult() | ast.Div() | ast.Mod(), _):
            yield other("scale", left)
        case ast.BinOp(left, ast.Add() | ast.Sub() as sign, right):
            opposite = ast.Sub() if isinstance(sign, ast.Add) else ast.Add()
            yield other("sign", ast.BinOp(left, opposite, right))
        case ast.BinOp(_, ast.FloorDiv(), _):
            yield other("one off", ast.BinOp(node, ast.Add(), ast.Constant(1)))
        case ast.UnaryOp(ast.Not(), operand):
            yield other("not", operand)
        case ast.BoolOp(kind, [first, *rest]):
            yield other("condition", first)
            yield other("condition", rest[0] if len(rest) == 1 else ast.BoolOp(kind, rest))
        case ast.IfExp(_, body, orelse):
            yield other("branch", body)
            yield other("branch", orelse)
        case ast.Constant(bool() as value):
            yield other("flag", ast.Constant(not value))
        case ast.Constant(int() as value):
            yield other("one off", ast.Constant(value + 1))
        case ast.Constant(str() as value):
            for cycle in _CYCLES:
                if value in cycle:
                    after = cycle[(cycle.index(value) + 1) % len(cycle)]
                    yield other("word", ast.Constant(after))
        case ast.Attribute(ast.Name("torch"), "float32" | "float64"):
            yield other("dtype", ast.Attribute(node.value, "bfloat16", ast.Load()))


def _of_call(node: ast.Call, other: Callable[[str, ast.expr], Site]) -> Iterator[Site]:
    match node.func:
        case ast.Name("range"):
            *first, last = node.args[:2]
            fewer = ast.BinOp(last, ast.Sub(), ast.Constant(1))
            yield other("turns", ast.Call(node.func, [*first, fewer, *node.args[2:]], []))
        case ast.Attribute(value, name) if name in _COPIES and not node.args:
            yield other("copy", value)
        case ast.Name("reversed" | "sorted"):
            yield other("order", ast.Call(ast.Name("list", ast.Load()), node.args[:1], []))
        case ast.Name("min" | "max" as name):
            opposite = ast.Name("max" if name == "min" else "min", ast.Load())
            yield other("extreme", ast.Call(opposite, node.args, node.keywords))
    if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield other("arguments", ast.Call(node.func, swapped, node.keywords))
    for keyword in node.keywords:
        if keyword.arg in _MANNERS:
            rest = [each for each in node.keywords if each is not keyword]
            yield other("manner", ast.Call(node.func, node.args, rest))
