"""How dense the lines of a code base are: `python tests/helpers/readability.py FOLDER...`.

Counts what a reader meets on a line: tokens, several assignments at once, names that say nothing, comments.
"""

import ast
import sys
import tokenize
from dataclasses import dataclass, fields
from pathlib import Path

# Names that fit anything, so that they tell a reader nothing.
VAGUE_NAMES = {
    "what", "part", "parts", "found", "own", "other", "others", "known", "place", "places", "seen", "shown",
    "wanted", "given", "having", "made", "whole", "rest", "most", "least", "all_of", "thing", "things",
    "stuff", "tmp", "data2", "res", "ret", "begun", "ours", "theirs",
}  # fmt: skip
_LAYOUT = {
    tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


@dataclass
class Counts:
    """Sums over files, which add up."""

    code_lines: int = 0
    tokens: int = 0
    comments: int = 0
    assignments: int = 0
    tuple_assignments: int = 0
    bound_names: int = 0
    vague_names: int = 0
    star_arguments: int = 0
    long_functions: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def row(self) -> str:
        return (
            f"{self.code_lines:6} lines  {self.tokens / max(1, self.code_lines):5.2f} tokens a line  "
            f"{100 * self.tuple_assignments / max(1, self.assignments):5.2f} % tuple assignments  "
            f"{100 * self.vague_names / max(1, self.bound_names):5.2f} % vague names  "
            f"{100 * self.comments / max(1, self.code_lines):5.2f} % comment lines  "
            f"{self.star_arguments:3} splats  {self.long_functions:3} functions over 40 lines"
        )


def count(path: Path) -> Counts:
    """The counts of one Python file; docstrings are not code."""
    text = path.read_text()
    tree = ast.parse(text)
    docstring_lines = _docstring_lines(tree)
    counts = Counts()
    code_lines = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                counts.comments += token.line.strip().startswith("#")
            if token.type in _LAYOUT or token.start[0] in docstring_lines:
                continue
            counts.tokens += 1
            code_lines.update(range(token.start[0], token.end[0] + 1))
    counts.code_lines = len(code_lines)
    for node in ast.walk(tree):
        _count_node(node, counts)
    return counts


def _docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def _count_node(node: ast.AST, counts: Counts) -> None:
    if isinstance(node, ast.Assign):
        counts.assignments += 1
        # `a, b = x, y` are two statements on one line; `height, width = shape` is one value of two parts
        pairs = isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
        counts.tuple_assignments += pairs
    elif isinstance(node, ast.AnnAssign):
        counts.assignments += 1
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        counts.bound_names += 1
        counts.vague_names += node.id.strip("_") in VAGUE_NAMES
    elif isinstance(node, ast.arg):
        counts.bound_names += 1
        counts.vague_names += node.arg.strip("_") in VAGUE_NAMES
    elif isinstance(node, ast.Call):
        # f(*(a, b, c), d): a tuple made only to pass arguments
        counts.star_arguments += any(
            isinstance(arg, ast.Starred) and isinstance(arg.value, (ast.Tuple, ast.List)) for arg in node.args
        )
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        counts.long_functions += node.end_lineno - node.lineno + 1 > 40


def count_all(folder: Path) -> Counts:
    return sum(map(count, sorted(folder.rglob("*.py"))), Counts())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        folder = Path(argument)
        total = count(folder) if folder.is_file() else count_all(folder)
        print(f"{total.row()}  {argument}")
