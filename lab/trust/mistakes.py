"""Small mistakes, made by rule: what a tired author could have typed, one at a time.

    python -m lab.trust.mistakes grpo.py      # every mistake that can be made in a file

A rule takes a node of the syntax tree and names the text to replace, so that a mistake changes
a few characters and leaves the rest of the file as it is. Not touched: demos, docstrings, type
hints, asserts, f-strings, what is printed, and what is said by `raise` (though the `raise` itself
may be lost). Nor what deletes files or ends processes, and the conditions that guard it: a mistake
there would not stay in the private copy that it is tried in.

lab/trust/mutate.py tries a sample of them against the tests.
"""

import ast
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARE = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}  # fmt: skip
TWINS = [
    ("min", "max"), ("any", "all"), ("sum", "mean"), ("floor", "ceil"), ("argmin", "argmax"),
    ("startswith", "endswith"), ("zeros", "ones"), ("zeros_like", "ones_like"), ("std", "var"),
    ("partition", "rpartition"), ("log", "log1p"), ("exp", "expm1"), ("lstrip", "rstrip"),
]  # fmt: skip
TWIN = {a: b for pair in TWINS for a, b in (pair, pair[::-1])}
BUILTIN_TWIN = {**TWIN, "sum": "max", "sorted": "list", "reversed": "list", "round": "int"}
LEAVES_OUT = {"detach", "clone", "copy", "strip", "lower", "flatten", "sorted", "abs", "float"}
SAYS = {"print", "tell", "warn", "write", "SystemExit", "set_description", "set_postfix"}
UNORDERED = {"isinstance", "hasattr", "getattr", "setattr", "issubclass", "zip", "range"}
DANGER = {"rmtree", "unlink", "kill", "killpg", "terminate", "send_signal", "rmdir", "remove"}
CACHES = {"cache", "lru_cache", "cached_property"}
# How often a rule is drawn, beside the others that a file has. Those whose mistakes crash at the
# first call teach less.
WEIGHT = {"return": 0.3, "swapped": 0.5, "keyword": 0.7, "negated": 0.7}


@dataclass(frozen=True)
class Mistake:
    file: str
    where: str  # the function or class around it, "" at the top level
    line: int  # of the text that is replaced
    statement: int  # first line of the innermost statement around it: what lab/trust/marks.py sees
    rule: str
    start: int  # bytes
    end: int
    new: str
    before: str  # the line, …
    after: str  # … and what it becomes
    names: tuple[str, ...] = ()  # what is defined there, if it runs once, at import (or is cached)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is called in lists: no line number, which moves with every change above it."""
        return self.file, self.where, self.before, self.after

    def made_in(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()


def mistakes(file: str, source: str) -> list[Mistake]:
    """All that can be made in a file, in order."""
    finder = Finder(file, source)
    finder.visit_all(finder.tree.body)
    return sorted(finder.found, key=lambda m: (m.start, m.end, m.new))


class Finder:
    def __init__(self, file: str, source: str):
        self.file, self.text, self.found = file, source.encode(), []
        self.tree = ast.parse(source)
        self.lines = [0]  # where each line starts, in bytes
        for line in self.text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.statement, self.names, self.in_function, self.where = 0, (), False, ()

    # ---- places ----------------------------------------------------------------------------------
    def start(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def code(self, node: ast.AST) -> str:
        return self.text[self.start(node) : self.end(node)].decode()

    def add(self, rule: str, start: int, end: int, new: str) -> None:
        line = self.text.count(b"\n", 0, start)
        left, stop = self.lines[line], self.text.find(b"\n", end)
        last = self.text[end : len(self.text) if stop < 0 else stop]
        before = self.text[left : self.lines[line + 1]].decode().strip()
        after = (self.text[left:start] + new.encode() + last).decode().strip().split("\n")[0]
        names = () if self.in_function else self.names
        place = (self.file, ".".join(self.where), line + 1, self.statement)
        self.found.append(Mistake(*place, rule, start, end, new, before, after, names))

    def replace(self, rule: str, node: ast.AST, new: str) -> None:
        self.add(rule, self.start(node), self.end(node), new)

    def between(self, rule: str, a: ast.AST, b: ast.AST, old: str, new: str) -> None:
        """Replace an operator: it stands between its operands, perhaps among brackets."""
        words = r"\b{}\b" if old[0].isalpha() else r"{}"
        gap = self.text[self.end(a) : self.start(b)].decode()
        at = re.search(words.format(re.escape(old).replace(r"\ ", r"\s+")), gap)
        if at:
            place = self.end(a) + len(gap[: at.start()].encode())
            self.add(rule, place, place + len(at[0].encode()), new)

    # ---- the walk --------------------------------------------------------------------------------
    def visit_all(self, body: list[ast.stmt]) -> None:
        for node in body:
            self.visit_statement(node)

    def visit_statement(self, node: ast.stmt) -> None:
        if is_demo(node) or isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Global):
            return
        kept = self.statement, self.names, self.in_function, self.where
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.where = (*self.where, node.name)
        self.statement = node.lineno
        if not self.in_function:
            self.names = defined(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                self.visit(default)
            cached = any(callee(d) in CACHES for d in node.decorator_list)
            self.in_function = not cached or self.in_function
            self.visit_all(node.body)
        elif isinstance(node, ast.ClassDef):
            self.visit_all(node.body)
        elif not is_said(node):
            self.on_statement(node)
            guards_danger = isinstance(node, ast.If | ast.While) and is_dangerous(node)
            for name, value in ast.iter_fields(node):
                if name in ("annotation", "type_comment") or name == "test" and guards_danger:
                    continue
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.stmt):
                        self.visit_statement(child)
                        self.statement = node.lineno
                    elif isinstance(child, ast.ExceptHandler | ast.match_case):
                        self.visit_all(child.body)
                        self.statement = node.lineno
                    elif isinstance(child, ast.AST) and not self.deletes(node):
                        self.visit(child)
        self.statement, self.names, self.in_function, self.where = kept

    def deletes(self, node: ast.stmt) -> bool:
        """Is this a plain statement that deletes or kills?"""
        return not hasattr(node, "body") and is_dangerous(node)

    def visit(self, node: ast.AST | None) -> None:
        if node is None or isinstance(node, ast.JoinedStr):  # 3.11 knows no places inside f-strings
            return
        if isinstance(node, ast.Call) and callee(node) in SAYS:
            return
        self.on_expression(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.operator | ast.cmpop | ast.expr_context | ast.boolop):
                self.visit(child)

    # ---- the rules -------------------------------------------------------------------------------
    def on_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(ast.Constant()):  # a docstring, or `...`
                return
            case ast.Expr(ast.Call()) | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
                if not is_dangerous(node):
                    self.replace("dropped", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                self.replace("dropped", node, "pass")
            case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
                old, new = ARITHMETIC[type(op)]
                self.between("arithmetic", node.target, node.value, old + "=", new + "=")
                self.replace("dropped", node, "pass")
            case ast.Return(value=value) if value and not isinstance(value, ast.Constant):
                self.replace("return", value, "None")
            case ast.If(test=test) | ast.While(test=test) if not is_dangerous(node):
                self.negate(test)

    def negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.BoolOp):
            self.replace("negated", test, f"not ({self.code(test)})")

    def on_expression(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                pairs = zip([node.left, *node.comparators], node.ops, node.comparators)
                for left, op, right in pairs:
                    self.between("comparison", left, right, *COMPARE[type(op)])
            case ast.BoolOp(op=op):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:]):
                    self.between("and/or", left, right, old, new)
            case ast.UnaryOp(op=ast.Not()):
                self.replace("negated", node, f"({self.code(node.operand)})")
            case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
                self.replace("arithmetic", node, f"({self.code(node.operand)})")
            case ast.IfExp(test=test):
                self.negate(test)
            case ast.comprehension():
                for test in node.ifs:
                    self.negate(test)
            case ast.BinOp(op=op) if type(op) in ARITHMETIC and self.are_numbers(node):
                self.between("arithmetic", node.left, node.right, *ARITHMETIC[type(op)])
            case ast.Constant(value=bool() as value):
                self.replace("constant", node, str(not value))
            case ast.Constant(value=int() | float() as value):
                for other in others(value):
                    self.replace("constant", node, repr(other))
            case ast.Call():
                self.on_call(node)
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if isinstance(bound, ast.Name | ast.Attribute | ast.Call):
                        self.replace("off by one", bound, f"{self.code(bound)} + 1")
            case ast.Attribute(attr=attr) if attr in TWIN and attr not in ("log", "exp"):
                self.add("twin", self.end(node) - len(attr), self.end(node), TWIN[attr])

    def are_numbers(self, node: ast.BinOp) -> bool:
        """Is it likely that this is arithmetic, and no text, list or path?"""
        sides = (node.left, node.right)
        if any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.Dict) for side in sides):
            return False
        if any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides):
            return False
        path = re.compile("path|folder|root|home|place|MODELS|name|file|text", re.I)
        return not (isinstance(node.op, ast.Div) and path.search(self.code(node)))

    def on_call(self, node: ast.Call) -> None:
        name, args = callee(node), [a for a in node.args if not isinstance(a, ast.Starred)]
        if isinstance(node.func, ast.Name) and name in BUILTIN_TWIN and not node.keywords:
            self.replace("twin", node.func, BUILTIN_TWIN[name])
        elif isinstance(node.func, ast.Attribute) and name in ("log", "exp"):
            self.add("twin", self.end(node.func) - len(name), self.end(node.func), TWIN[name])
        if name in LEAVES_OUT and isinstance(node.func, ast.Attribute) and not args:
            self.replace("left out", node, self.code(node.func.value))
        if name in LEAVES_OUT and isinstance(node.func, ast.Name) and len(args) == 1:
            self.replace("left out", node, f"({self.code(args[0])})")
        if name == "range" and len(args) == 1 and not isinstance(args[0], ast.Constant):
            self.replace("off by one", args[0], f"{self.code(args[0])} - 1")
        if len(args) >= 2 and len(args) == len(node.args) and name not in UNORDERED:
            a, b = self.code(args[0]), self.code(args[1])
            gap = self.text[self.end(args[0]) : self.start(args[1])].decode()
            if a != b:
                self.add("swapped", self.start(args[0]), self.end(args[1]), b + gap + a)
        everything = sorted([*node.args, *node.keywords], key=self.start)
        for left, right in zip(everything, everything[1:]):
            gap = self.text[self.end(left) : self.start(right)].decode()
            if isinstance(right, ast.keyword) and right.arg and gap.strip() == ",":
                self.add("keyword", self.end(left), self.end(right), "")


def others(value: int | float) -> list[int | float]:
    """What could stand there by mistake."""
    if isinstance(value, float):
        return [0.1 if value == 0 else float(f"{value * (1.25 if value >= 1e-3 else 100):.12g}")]
    if value >= 1000:
        return [value + value // 8]
    return [value + 1] if value == 0 else [value + 1, value - 1]


def callee(node: ast.expr) -> str:
    """The last part of what is called: "mean" of x.mean() and of @mean."""
    func = node.func if isinstance(node, ast.Call) else node
    return getattr(func, "attr", getattr(func, "id", ""))


def is_demo(node: ast.stmt) -> bool:
    """`if __name__ == "__main__"`, or the function `demo` that it calls."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "demo"
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def is_said(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and (
        callee(node.value) in SAYS
    )  # fmt: skip


def is_dangerous(node: ast.AST) -> bool:
    return any(callee(n) in DANGER for n in ast.walk(node) if isinstance(n, ast.Call))


def defined(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    inner = [n for target in targets if target is not None for n in ast.walk(target)]
    return tuple(n.id for n in inner if isinstance(n, ast.Name))


# ------------------------------------------------------------------------------------------- a sample


def shares(weights: dict[str, int], n: int, least: int) -> dict[str, int]:
    """How many of n each file gets: in proportion to its weight, but at least `least`."""
    total = sum(weights.values())
    return {file: max(least, math.floor(0.5 + n * w / total)) for file, w in weights.items()}


def sample(root: Path, files: list[str], n: int, seed: int, least: int = 4) -> list[Mistake]:
    """About n mistakes, drawn per file and there per rule; at most one per line and file.

    The draw of a file depends on nothing but its own text, n and the seed.
    """
    of = {file: mistakes(file, (root / file).read_text()) for file in files}
    lines = {file: len({m.line for m in found}) for file, found in of.items()}
    out = []
    for file, k in shares(lines, n, least).items():
        out += draw(of[file], (root / file).read_text(), k, random.Random(f"{seed} {file}"))
    return out


def draw(found: list[Mistake], source: str, k: int, rng: random.Random) -> list[Mistake]:
    by_rule = defaultdict(list)
    for mistake in found:
        by_rule[mistake.rule].append(mistake)
    tree, taken, lines = ast.dump(ast.parse(source)), [], set()
    while by_rule and len(taken) < k:
        rules = list(by_rule)
        rule = rng.choices(rules, [WEIGHT.get(r, 1.0) for r in rules])[0]
        mistake = by_rule[rule].pop(rng.randrange(len(by_rule[rule])))
        if not by_rule[rule]:
            del by_rule[rule]
        known = mistake.line in lines or mistake.key in {m.key for m in taken}
        if not known and changes(mistake, source, tree):
            lines.add(mistake.line)
            taken.append(mistake)
    return sorted(taken, key=lambda m: m.start)


def changes(mistake: Mistake, source: str, tree: str) -> bool:
    """Is it still Python, and another program?"""
    try:
        return ast.dump(ast.parse(mistake.made_in(source))) != tree
    except SyntaxError:
        return False


def shown(found: list[Mistake]) -> Iterator[str]:
    for m in found:
        yield f"{m.file}:{m.line} {m.rule}\n    - {m.before}\n    + {m.after}"


if __name__ == "__main__":
    import sys

    file = sys.argv[1] if len(sys.argv) > 1 else "grpo.py"
    everything = mistakes(file, Path(file).read_text())
    print("\n".join(shown(everything)))
    print(f"{len(everything)} mistakes on {len({m.line for m in everything})} lines of {file}")
