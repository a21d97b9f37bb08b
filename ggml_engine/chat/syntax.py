"""The syntax tree of a chat template: what it may hold, and how it is rewritten so that its costs are metered.

Loops, slices, comparisons, `~`, macros and literals go through the filters named `#...` of `vocabulary` (no template
can spell such a name). Invariants: an unlisted node is refused; every loop turn and macro call pays for the size of its
body; a string literal of the template arrives as an authored `Text`.
"""

from __future__ import annotations

from typing import Any, cast

from jinja2 import nodes

from ggml_engine.errors import ChatTemplateError

from . import operations as ops
from .text import Text, authored

_MAX_LOOP_NESTING = 12
_MAX_NODE_DEPTH = 128
# Jinja's compiler copies the table of names at every branch.
_MAX_NAMES_TIMES_BRANCHES = 1_000_000

_STATEMENTS = (
    *(nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With),
    *(nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Scope, nodes.Continue, nodes.Break),
)
_EXPRESSIONS = (
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.TemplateData, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair),
    *(nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
    *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr),
)
# Work of a node when it runs, where it is more than one: roughly, the bytes it allocates over 16.
_NODE_WORK: dict[type[nodes.Node], int] = {
    nodes.List: 8,
    nodes.Tuple: 8,
    nodes.Dict: 16,
    nodes.Macro: 32,
    nodes.CallBlock: 32,
    nodes.For: 16,
    nodes.Call: 4,
    nodes.Filter: 3,
    nodes.Test: 3,
}
_BRANCHES = (nodes.If, nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With, nodes.Scope)
_PAID_APART = (nodes.For, nodes.Macro, nodes.CallBlock)


def check(tree: nodes.Template, max_nodes: int) -> None:
    """Refuses a tree with unlisted nodes, too many of them, or too deep a nesting. Recurses nowhere."""
    n_nodes = n_branches = 0
    names: set[str] = set()
    level: list[tuple[nodes.Node, int]] = [(tree, 0)]
    for _ in range(_MAX_NODE_DEPTH):
        below: list[tuple[nodes.Node, int]] = []
        for node, n_loops in level:
            n_nodes += 1
            _check_node(node, n_loops)
            n_branches += isinstance(node, _BRANCHES)
            if isinstance(node, nodes.Name):
                names.add(node.name)
            inner_loops = n_loops + isinstance(node, nodes.For)
            below.extend((child, inner_loops) for child in node.iter_child_nodes())
        if n_nodes > max_nodes:
            raise ChatTemplateError(f"the chat template has more than {max_nodes} nodes")
        if len(names) * n_branches > _MAX_NAMES_TIMES_BRANCHES:
            raise ChatTemplateError(f"the chat template has {len(names)} names in {n_branches} branches, too many")
        if not below:
            return
        level = below
    raise ChatTemplateError(f"the chat template nests deeper than {_MAX_NODE_DEPTH} levels")


def _check_node(node: nodes.Node, n_loops: int) -> None:
    if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS)):
        raise ops.refuse(f"'{type(node).__name__.lower()}' (line {node.lineno})")
    if isinstance(node, nodes.For):
        if node.recursive:
            raise ops.refuse(f"a recursive loop (line {node.lineno})")
        if n_loops >= _MAX_LOOP_NESTING:
            raise ChatTemplateError(f"the chat template nests loops deeper than {_MAX_LOOP_NESTING}")
    if isinstance(node, nodes.Const):
        ops.checked(node.value)


def _body_work(node: nodes.Node) -> int:
    """Work of one run of what is inside `node`; loops and macros inside pay for their own bodies."""
    work = 0
    waiting = [node]
    while waiting:
        for child in waiting.pop().iter_child_nodes():
            work += _NODE_WORK.get(type(child), 1)
            if not isinstance(child, _PAID_APART):
                waiting.append(child)
    return work


class Rewriter:
    """Rewrites a checked tree so that whatever grows with a value's size goes through a metered filter.

    The tree reads its string literals from `environment.literals`, which is to be the `literals` of this object.
    """

    def __init__(self) -> None:
        self.literals: list[Text] = []

    def visit(self, node: nodes.Node) -> Any:
        work = _body_work(node) if isinstance(node, (*_PAID_APART, nodes.Template)) else 0
        unchanged = node.arg if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None
        for field, value in node.iter_fields():
            if isinstance(value, list):
                setattr(node, field, [self.visit(item) if isinstance(item, nodes.Node) else item for item in value])
            elif isinstance(value, nodes.Node) and value is not unchanged:
                setattr(node, field, self.visit(value))
        rewrite = getattr(self, f"_{type(node).__name__.lower()}", None)
        if getattr(node, "dyn_args", None) is not None:
            node.dyn_args = _through("#arguments", node.dyn_args)  # type: ignore[attr-defined]
        if getattr(node, "dyn_kwargs", None) is not None:
            node.dyn_kwargs = _through("#arguments", node.dyn_kwargs)  # type: ignore[attr-defined]
        return rewrite(node, work) if rewrite else node

    def _for(self, node: nodes.For, work: int) -> nodes.Node:
        node.iter = _through("#iterate", cast("nodes.Expr", node.iter), nodes.Const(work))
        return node

    def _template(self, node: nodes.Template | nodes.Macro | nodes.CallBlock, work: int) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(_through("#tick", nodes.Const(work))))
        return node

    _macro = _callblock = _template

    def _const(self, node: nodes.Const, _work: int) -> nodes.Node:
        return self._literal(node.value, node.lineno) if isinstance(node.value, str) else node

    def _templatedata(self, node: nodes.TemplateData, _work: int) -> nodes.Node:
        return self._literal(node.data, node.lineno)

    def _literal(self, text: str, line: int) -> nodes.Node:
        self.literals.append(authored(text))
        return nodes.EnvironmentAttribute(f"literals[{len(self.literals) - 1}]", lineno=line)

    def _concat(self, node: nodes.Concat, _work: int) -> nodes.Node:
        return _through("#concat", nodes.List(node.nodes, lineno=node.lineno))

    def _getitem(self, node: nodes.Getitem, _work: int) -> nodes.Node:
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _through("#slice", node.node, *(nodes.Const(None) if bound is None else bound for bound in bounds))

    def _compare(self, node: nodes.Compare, _work: int) -> nodes.Node:
        # Equality with a literal costs no more than the literal is long.
        literal = (nodes.Const, nodes.EnvironmentAttribute)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if all(operand.op in {"eq", "ne"} for operand in node.ops) and any(isinstance(o, literal) for o in operands):
            return node
        node.expr = _through("#operand", node.expr)
        for operand in node.ops:
            operand.expr = _through("#operand", operand.expr)
        return node

    def _pair(self, node: nodes.Pair, _work: int) -> nodes.Node:
        node.key = _through("#operand", node.key)
        return node


def _through(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
