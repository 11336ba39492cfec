"""One snapshot of every message that an error or a warning can show: messages.txt, read from the source by ast.

Other tests look at an error's class and attributes; wording is compared here alone. After a change of wording run
`python tests/test_messages.py` and read the diff of messages.txt.
"""

import ast
import re
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "paclm"
SNAPSHOT = Path(__file__).with_name("messages.txt")
DIALECT = re.compile(r"\b(whoever|nobody|anybody|anew|mend\w*|books|put back|told|tells)\b", re.IGNORECASE)
BUILT_IN = {"Exception", "PydanticCustomError", "warn"}
ENDING = re.compile(r"""[.!?…}>`]$|: ([^:]*|paclm .*)$""")  # a full stop, or a command or value after a colon
FRAGMENTS = {"BadRow", "_tampered", "problem"}  # the rest of a sentence that another line begins
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(node):
    """The last name of `errors.InvalidInput`, `InvalidInput` or "InvalidInput"."""
    return str(getattr(node, "attr", getattr(node, "id", getattr(node, "value", ""))))


def error_makers(nodes):
    """Names of our exception classes, and of the functions that return one of them."""
    found = set(BUILT_IN)
    for _ in range(4):  # as deep as the classes are derived from each other
        for node in nodes:
            if isinstance(node, ast.ClassDef) and found & set(map(name_of, node.bases)):
                found.add(node.name)
    return found | {node.name for node in nodes if isinstance(node, Function) and name_of(node.returns) in found}


def written(text):
    """What is left of a template without its {expressions}."""
    shorter = re.sub(r"\{[^{}]*\}", "", text)
    return text if shorter == text else written(shorter)


class Messages(ast.NodeVisitor):
    """The messages of one file. What is computed stands as {expression}, alternatives as <this | that>."""

    def __init__(self, tree, makers):
        self.makers, self.found = makers, set[str]()
        self.scopes: list[ast.AST] = [tree]
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        self.rendering: list[str] = []
        self.visit(tree)

    def generic_visit(self, node):
        is_scope = isinstance(node, Function | ast.ClassDef)
        self.scopes += [node] * is_scope
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):  # not a docstring
            super().generic_visit(node)
        if is_scope:
            self.scopes.pop()

    def visit_JoinedStr(self, node):
        if isinstance(self.scopes[-1], Function) and "caution" in self.scopes[-1].name:
            self.add(self.scopes[-1].name, node)

    visit_Constant = visit_JoinedStr  # noqa: N815

    def visit_Call(self, node):
        name = name_of(node.func)
        if name == "__init__":
            name = next((scope.name for scope in reversed(self.scopes) if isinstance(scope, ast.ClassDef)), name)
        if name in self.makers:
            for given in (*node.args, *(keyword.value for keyword in node.keywords)):
                self.add(name, given)
        self.generic_visit(node)

    def add(self, name, node):
        text = self.render(node)
        if " " in written(text):  # not a code, a path or a number
            self.found.add(f"{name}  {text}")

    def render(self, node):
        match node:
            case ast.Constant(value=str(text)):
                return text.replace("\n", "\\n")
            case ast.JoinedStr(values=parts):
                return "".join(map(self.render, parts))
            case ast.FormattedValue(value=value) | ast.Call(func=ast.Attribute(value=value, attr="format")):
                return self.render(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.render(left) + self.render(right)
            case ast.IfExp(body=first, orelse=second) | ast.BoolOp(op=ast.Or(), values=[first, second]):
                found = [first, second]
            case ast.Name(id=name):
                found = self.assigned(name)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                found = [
                    one.value for one in ast.walk(self.functions[name]) if isinstance(one, ast.Return) and one.value
                ]
            case _:
                found = []
        self.rendering.append(ast.dump(node))
        texts = [self.render(one) for one in found if ast.dump(one) not in self.rendering]
        self.rendering.pop()
        if " " not in written("".join(texts)):
            return f"{{{ast.unparse(node)}}}"
        return texts[0] if len(texts) == 1 else f"<{' | '.join(texts)}>"

    def assigned(self, name):
        """What the nearest scope assigns to a name."""
        for scope in reversed(self.scopes):
            if found := [
                one.value
                for one in ast.walk(scope)
                if isinstance(one, ast.Assign | ast.NamedExpr | ast.AugAssign)
                for target in getattr(one, "targets", [getattr(one, "target", None)])
                if name_of(target) == name
            ]:
                return found
        return []


@cache
def messages():
    trees = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    makers = error_makers([node for tree in trees.values() for node in ast.walk(tree)])
    return sorted(f"{path}  {line}" for path, tree in trees.items() for line in Messages(tree, makers).found)


def test_the_snapshot_of_all_messages_is_current():
    assert SNAPSHOT.read_text().splitlines() == messages(), "run `python tests/test_messages.py` and read the diff"


def test_messages_are_plain_sentences():
    lines = messages()
    assert [line for line in lines if DIALECT.search(written(line))] == []
    sentences = [line for line in lines if line.split("  ")[1] not in FRAGMENTS]
    assert [line for line in sentences if not ENDING.search(line)] == []


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in messages()))
