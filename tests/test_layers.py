"""Imports point down only, and implementations see nothing of the judge but the contract."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Layers from the bottom up, one a line; a module may import from its own and from those below.
_LAYERS = """
version contract comm schedules formulas promises errors case verdicts
oracle mantissa replay optimizers workloads ledgers backends registry
checks evidence account kills scenarios campaign
launch loading rank_program decide judge runner results records sealed budget calibrate \
capability_matrix bundle gathered timing worker cluster verify resume junit doctor overhead \
comparison
cli report badges bubbles __main__ __init__ catalogue execute progress \
selection bench_command pairs_command scaling_command compare_commands evidence_commands \
pytest_plugin proving
"""
LAYERS: list[set[str]] = [set(line.split()) for line in _LAYERS.strip().splitlines()]
#: Vocabulary that may be asked from anywhere: it only reads names or writes text.
EXCEPTIONS = {
    ("formulas", "workloads"),  # facts_of(case) asks the workload for its shapes
    ("promises", "workloads"),  # so does plan_of(case, workload, model)
    ("oracle", "launch"),  # its cache is written in the ranks' own packing format
}
ALLOWED_FOR_IMPLEMENTATIONS = ("shardproof.contract", "shardproof.comm", "shardproof.schedules")
#: Strategy files that may import other strategies.
COMPOSERS = {"hybrid"}


def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def layer_of(name: str) -> int:
    for number, members in enumerate(LAYERS):
        if name in members:
            return number
    raise AssertionError(f"suite.{name} stands in no layer: add it to LAYERS")


def test_every_module_imports_downwards_only() -> None:
    wrong = []
    for path in (ROOT / "suite").rglob("*.py"):
        own = path.relative_to(ROOT / "suite").parts[0].removesuffix(".py")
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "suite" or len(parts) < 2:
                continue
            target = parts[1]
            if (
                not (ROOT / "suite" / target).is_dir()
                and not (ROOT / "suite" / f"{target}.py").exists()
            ):
                continue
            if layer_of(target) > layer_of(own) and (own, target) not in EXCEPTIONS:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_implementations_import_the_contract_only() -> None:
    wrong = []
    for path in (ROOT / "impls").rglob("*.py"):
        # A fault also names the case that shows it.
        more = ("shardproof.case",) if "mutants" in path.parts else ()
        for name in imports(path):
            if name.startswith("suite.") and not name.startswith(
                (*ALLOWED_FOR_IMPLEMENTATIONS, *more)
            ):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_strategy_imports_another() -> None:
    reference = ROOT / "impls" / "reference"
    shared = {"engine", "parts", "__init__"}
    wrong = []
    for path in reference.rglob("*.py"):
        own = path.relative_to(reference).parts[0].removesuffix(".py")
        if own in shared or own in COMPOSERS:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] == ["impls", "reference"] and len(parts) > 2:
                target = parts[2]
                if target not in shared and target != own:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_reference_strategies_stay_readable() -> None:
    """Under 250 lines of code, docstrings, comments and blank lines not counted."""
    for path in (ROOT / "impls" / "reference").rglob("*.py"):
        tree = ast.parse(path.read_text())
        skipped: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
                node
            ):
                doc = node.body[0]
                skipped |= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
        lines = [
            text
            for number, text in enumerate(path.read_text().splitlines(), 1)
            if text.strip() and not text.strip().startswith("#") and number not in skipped
        ]
        assert len(lines) < 250, f"{path.relative_to(ROOT)} has {len(lines)} lines of code"
