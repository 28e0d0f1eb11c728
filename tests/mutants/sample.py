"""Which mutants are tried: places in the code, drawn with a seed, and one change at each."""

import random
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import NodeOrLeaf

# Near misses only: `a >> b` for `a + b`, or a dataclass without its decorator, fails any test and would flatter them.
# A cached function without its decorator only takes longer, and annotations (`int | None`) aren't run. Arguments of
# decorators (`frozen`, `slots`), `strict` of `zip` and the `*` before keywords guard against mistakes in other code, so
# they are left alone.
NEAR = re.compile(
    "core/("
    "ReplaceComparisonOperator_((Lt|LtE|Gt|GtE)_(Lt|LtE|Gt|GtE)|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    "|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Pow_Mul)"
    "|ReplaceUnaryOperator_Delete_(USub|Not)|AddNot|ReplaceAndWithOr|ReplaceOrWithAnd"
    "|ReplaceTrueWithFalse|ReplaceFalseWithTrue|NumberReplacer|ZeroIterationForLoop"
    "|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ExceptionReplacer)"
)
OPERATORS = [name for name in operator_names() if NEAR.fullmatch(name)]


@dataclass(frozen=True)
class Mutant:
    """A module with one change. `before` and `after` are the lines that differ, stripped and joined by spaces."""

    path: str
    line: int
    before: str
    after: str
    code: str


def _mutant(root: Path, path: str, operator: str, occurrence: int) -> Mutant:
    original = (root / path).read_text(encoding="utf-8")
    code = mutate_code(original, get_operator(operator)(), occurrence)
    old, new = original.splitlines(), code.splitlines()
    start = next(at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    end = next(at for at, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b)
    before, after = (" ".join(map(str.strip, lines[start : len(lines) - end])) for lines in (old, new))
    return Mutant(path, start + 1, before, after, code)


def _is_guard(node: NodeOrLeaf | None) -> bool:
    if node is None:
        return False
    strict = node.type == "argument" and node.children[0].get_code().strip() == "strict"
    keywords = node.type == "operator" and node.parent is not None and node.parent.type in ("parameters", "param")
    return strict or keywords or node.type == "decorator" or _is_guard(node.parent)


def _places(root: Path, path: str) -> dict[tuple[str, tuple[int, int]], list[tuple[str, int]]]:
    """Where a module can be changed: position → the operators that change it there, each with its occurrence."""
    nodes = list(ast_nodes(get_ast((root / path).read_text(encoding="utf-8"))))
    changes = defaultdict(list)
    for name in OPERATORS:
        operator = get_operator(name)()
        positions = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, start) in enumerate(positions):
            if not _is_guard(node):
                changes[path, start].append((name, occurrence))
    return changes


def sample(root: Path, folder: str, size: int, seed: int) -> list[Mutant]:
    """At most `size` mutants of the modules in a folder, no two at one place, in the order of the modules.

    A place is drawn first and its change second: comparisons, which have several, are not drawn more often.
    """
    places = {}
    for file in sorted((root / folder).glob("*.py")):
        places |= _places(root, file.relative_to(root).as_posix())
    draw = random.Random(f"{seed} {folder}")
    drawn = draw.sample(sorted(places), min(size, len(places)))
    return [_mutant(root, path, *draw.choice(places[path, start])) for path, start in sorted(drawn)]
