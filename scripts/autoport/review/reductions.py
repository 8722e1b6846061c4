"""Follows outputs of row-parallel operators through a forward and counts how often they are reduced.

A small abstract interpreter: a value is a `Partial` (how often it has been summed over the ranks, and where
it comes from), or None for anything else. Both sides of a branch are followed; a condition keeps its outcome
along a path, and "more than one rank" is taken to be true.
"""

import ast
import functools

from autoport.review.finding import Status, Subject
from autoport.review.names import origins
from autoport.review.parameters import loader_of
from autoport.review.partial_sums import BiasSum, Event, Origin, Partial, Path, Value
from autoport.review.source import Class, Function
from autoport.review.syntax import argument, is_none, keyword, last_name, self_attribute

ROW_PARALLEL = {"attention_decode", "o_proj", "mlp", "moe_cte", "moe_tkg", "moe_block_tkg"}
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter"}
IN_PLACE = {"all_reduce"}
REDUCTIONS = {
    "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_tensor",
    "tensor_model_parallel_all_reduce",
}  # fmt: skip
# Methods that give another view of the same sums, or scale them.
TRANSPARENT = {
    "view", "reshape", "squeeze", "unsqueeze", "transpose", "permute", "contiguous", "to", "float", "half",
    "bfloat16", "flatten", "narrow", "clone", "type", "type_as", "t", "mul", "div", "mul_", "div_", "expand",
    "index_select",
}  # fmt: skip
WORLD_SIZES = {
    "world_size",
    "tp_size",
    "tp_degree",
    "sp_size",
    "num_shards",
    "tp_world_size",
    "sp_world_size",
}
MAX_PATHS = 64
MAX_DEPTH = 10


class Reductions:
    """Runs forwards of a port and collects `events`."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.source = subject.source
        self.events: dict[Event, None] = {}
        self.biases: dict[ast.expr, BiasSum] = {}
        self.visited: set[ast.AST] = set()
        self._stack: list[ast.AST] = []
        self._memo: dict[tuple[object, ...], list[Value]] = {}

    def run_all(self) -> None:
        """Follow every head, then the modules that no head was seen to reach."""
        for head in self.source.heads:
            self.run(head)
        for cls in self.source.modules:
            forward = self.source.method(cls, "forward")
            if forward and forward.node not in self.visited:
                for value in self.run(cls):
                    if value is not None and value.reductions == 0:
                        self.record(
                            "judge", value, f"returned by {cls.name}.forward: does its caller sum it?"
                        )

    def run(self, cls: Class) -> list[Value]:
        """Follow the class's forward; returns what it may return."""
        forward = self.source.method(cls, "forward")
        return self._call(forward, {}) if forward else []

    def record(self, status: Status, value: Partial, text: str) -> None:
        for origin in value.origins:
            self.events[Event(status, origin, text)] = None

    # --- Functions ---------------------------------------------------------------------------------

    def _call(self, function: Function, arguments: dict[str, Value]) -> list[Value]:
        key = (
            function.node,
            function.owner.node if function.owner else None,
            tuple(sorted(arguments.items(), key=str)),
        )
        if key in self._memo:
            return self._memo[key]
        if function.node in self._stack or len(self._stack) >= MAX_DEPTH:
            return [None]
        self.visited.add(function.node)
        self._stack.append(function.node)
        returned: list[Value] = []
        self._block(function, function.node.body, [Path(dict(arguments), {})], returned)
        self._stack.pop()
        self._memo[key] = list(dict.fromkeys(returned)) or [None]
        return self._memo[key]

    def _block(
        self, function: Function, body: list[ast.stmt], paths: list[Path], returned: list[Value]
    ) -> list[Path]:
        for statement in body:
            paths = [
                after for path in paths for after in self._statement(function, statement, path, returned)
            ]
            paths = list({path.key(): path for path in paths}.values())[:MAX_PATHS]
        return paths

    def _statement(self, function: Function, node: ast.stmt, path: Path, returned: list[Value]) -> list[Path]:
        if isinstance(node, ast.If):
            after = []
            for outcome, branch in self._test(function, node.test, path):
                after += self._block(function, node.body if outcome else node.orelse, [branch], returned)
            return after
        if isinstance(node, (ast.For, ast.While)):
            return self._block(function, node.body, [path], returned)
        if isinstance(node, (ast.With, ast.Try)):
            return self._block(function, node.body, [path], returned)
        if isinstance(node, ast.Return):
            if node.value is not None:
                returned += self._values(function, node.value, path)
            return []
        if isinstance(node, (ast.Raise, ast.Continue, ast.Break)):
            return [] if isinstance(node, ast.Raise) else [path]
        if isinstance(node, ast.Assign):
            return self._assign(function, node.targets[0], node.value, path)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self._assign(function, node.target, node.value, path)
        if isinstance(node, ast.AugAssign):
            sum_ = ast.copy_location(ast.BinOp(left=_loaded(node.target), op=node.op, right=node.value), node)
            return self._assign(function, node.target, sum_, path)
        if isinstance(node, ast.Expr):
            self._values(function, node.value, path)
        return [path]

    def _assign(self, function: Function, target: ast.expr, value: ast.expr, path: Path) -> list[Path]:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for item, part in zip(target.elts, value.elts, strict=True):
                if isinstance(item, ast.Name):
                    path.values[item.id] = self._values(function, part, path)[0]
            return [path]
        after = []
        for result in self._values(function, value, path):
            branch = path.fork()
            # Of several results the first is the projected output, as in (output, k, v).
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for position, name in enumerate(names):
                if isinstance(name, ast.Name):
                    branch.values[name.id] = result if position == 0 else None
                    branch.forget(name.id)
            after.append(branch)
        return after

    # --- Conditions --------------------------------------------------------------------------------

    def _test(
        self, function: Function, test: ast.expr, path: Path, depth: int = MAX_DEPTH
    ) -> list[tuple[bool, Path]]:
        """The outcomes a condition can have on this path, each with what is then known."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return [
                (not outcome, branch) for outcome, branch in self._test(function, test.operand, path, depth)
            ]
        if isinstance(test, ast.BoolOp):
            stop = isinstance(test.op, ast.Or)
            open_, closed = [path], []
            for part in test.values:
                results = [item for branch in open_ for item in self._test(function, part, branch, depth)]
                closed += [(stop, branch) for outcome, branch in results if outcome == stop]
                open_ = [branch for outcome, branch in results if outcome != stop]
            return closed + [(not stop, branch) for branch in open_]
        if isinstance(test, ast.Name) and depth:
            defined = [item for item in origins(function, test) if item is not test]
            if len(defined) == 1 and isinstance(defined[0], (ast.Compare, ast.UnaryOp, ast.BoolOp)):
                return self._test(function, defined[0], path, depth - 1)
        several = _several_ranks(test)
        if several is not None:
            return [(several, path)]
        positive = _without_negation(test)
        if positive is not None:
            return [(not outcome, branch) for outcome, branch in self._test(function, positive, path, depth)]
        atom = ast.unparse(test)
        if atom in path.conditions:
            return [(path.conditions[atom], path)]
        branches = []
        for outcome in (True, False):
            branch = path.fork()
            branch.conditions[atom] = outcome
            branches.append((outcome, branch))
        return branches

    # --- Expressions -------------------------------------------------------------------------------

    def _values(self, function: Function, node: ast.expr, path: Path) -> list[Value]:
        """The values an expression may have; reductions in place change `path`."""
        if isinstance(node, ast.Name):
            return [path.values.get(node.id)]
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self._values(function, node.value, path)
        if isinstance(node, ast.Attribute):
            return self._values(function, node.value, path) if node.attr in ("T", "mT", "data") else [None]
        if isinstance(node, ast.Tuple):
            return self._values(function, node.elts[0], path) if node.elts else [None]
        if isinstance(node, ast.IfExp):
            found: list[Value] = []
            for outcome, branch in self._test(function, node.test, path):
                found += self._values(function, node.body if outcome else node.orelse, branch)
            return list(dict.fromkeys(found))
        if isinstance(node, ast.BinOp):
            return self._binary(function, node, path)
        if isinstance(node, ast.Call):
            return self._call_expression(function, node, path)
        return [None]

    def _binary(self, function: Function, node: ast.BinOp, path: Path) -> list[Value]:
        if isinstance(node.op, ast.MatMult) and self._is_row_parallel_weight(function, node.right):
            return [Partial(0, (Origin("matmul", function.file.at(node)),))]
        results: list[Value] = []
        for left in self._values(function, node.left, path):
            for right in self._values(function, node.right, path):
                if isinstance(node.op, (ast.Add, ast.Sub)):
                    results.append(self._sum(function, node, left, right))
                else:
                    results.append(left or right)
        return list(dict.fromkeys(results))

    def _sum(self, function: Function, node: ast.BinOp, left: Value, right: Value) -> Value:
        if left is None and right is None:
            return None
        value = left or right
        assert value is not None
        where = function.file.at(node)
        if left is not None and right is not None:
            both = Partial(
                max(left.reductions, right.reductions), tuple(dict.fromkeys(left.origins + right.origins))
            )
            if left.reductions != right.reductions:
                self.record(
                    "fail", both, f"one of the two sums added at {where} is reduced, the other is not"
                )
            return both
        other = node.right if left is not None else node.left
        if "bias" in self_attribute(other):
            reduced = value.reductions > 0 and (other not in self.biases or self.biases[other].reduced)
            self.biases[other] = BiasSum(function, other, reduced)
        if value.reductions == 0 and not self_attribute(other) and not isinstance(other, ast.Constant):
            self.record("fail", value, f"added at {where} before it is summed over the ranks")
            return None
        return value

    def _call_expression(self, function: Function, call: ast.Call, path: Path) -> list[Value]:
        operator = self.subject.functional_op(function, call)
        if operator in ROW_PARALLEL and not _keeps_heads(operator, call):
            self._no_partial_argument(function, call, path)
            return [Partial(0, (Origin(operator, function.file.at(call)),))]
        name = last_name(call.func)
        if name in REDUCTIONS and not operator:
            return self._reduce(function, call, name, path)
        if isinstance(call.func, ast.Attribute):
            bases = self._values(function, call.func.value, path)
            if any(bases) and name in TRANSPARENT:
                return bases
            if any(bases) and name in ("add", "add_") and call.args:
                sum_ = ast.copy_location(
                    ast.BinOp(left=call.func.value, op=ast.Add(), right=call.args[0]), call
                )
                return self._binary(function, sum_, path)
        if name in ("matmul", "linear") and any(
            self._is_row_parallel_weight(function, item) for item in call.args
        ):
            return [Partial(0, (Origin(name, function.file.at(call)),))]
        if self._is_row_parallel_linear(function, call):
            return [Partial(1, (Origin("RowParallelLinear", function.file.at(call)),))]
        called = self.source.resolve(function, call.func)
        if called:
            results = [
                value for item in called for value in self._call(item, self._bind(item, function, call, path))
            ]
            return list(dict.fromkeys(results))
        self._no_partial_argument(function, call, path)
        return [None]

    def _reduce(self, function: Function, call: ast.Call, name: str, path: Path) -> list[Value]:
        operand = call.args[0] if call.args else (keyword(call, "input_") or keyword(call, "tensor"))
        if operand is None:
            return [None]
        results: list[Value] = []
        for value in self._values(function, operand, path):
            if value is None:
                results.append(None)
                continue
            where = function.file.at(call)
            if value.reductions:
                self.record("fail", value, f"summed over the ranks a second time by {name} at {where}")
            else:
                self.record("pass", value, f"summed over the ranks once, by {name} at {where}")
            results.append(value._replace(reductions=value.reductions + 1))
        if name in IN_PLACE and isinstance(operand, ast.Name):
            path.values[operand.id] = results[0]
        return results

    def _no_partial_argument(self, function: Function, call: ast.Call, path: Path) -> None:
        for item in (*call.args, *(entry.value for entry in call.keywords)):
            for value in self._values(function, item, path) if not isinstance(item, ast.Call) else ():
                if value is not None and value.reductions == 0:
                    where = function.file.at(call)
                    self.record(
                        "judge", value, f"given to {ast.unparse(call.func)} at {where}: is it summed there?"
                    )

    def _bind(self, called: Function, function: Function, call: ast.Call, path: Path) -> dict[str, Value]:
        bound: dict[str, Value] = {}
        for name, item in zip(called.parameters, call.args, strict=False):
            bound[name] = self._values(function, item, path)[0]
        for entry in call.keywords:
            if entry.arg:
                bound[entry.arg] = self._values(function, entry.value, path)[0]
        return {name: value for name, value in bound.items() if value is not None}

    def _is_row_parallel_linear(self, function: Function, call: ast.Call) -> bool:
        attribute = self_attribute(call.func)
        if not attribute or function.owner is None:
            return False
        kinds = [name for name, _ in self.source.attribute_types(function.owner, attribute)]
        return any(kind.rpartition(".")[2] == "RowParallelLinear" for kind in kinds)

    def _is_row_parallel_weight(self, function: Function, node: ast.expr) -> bool:
        """Whether an expression is the sharded weight of an output or down projection."""
        while isinstance(node, (ast.Attribute, ast.Call)) and not self_attribute(node):
            node = node.value if isinstance(node, ast.Attribute) else node.func
        attribute = self_attribute(node)
        if not attribute.startswith(("o_proj", "down_proj")) or function.owner is None:
            return False
        return loader_of(self.source, function.owner, attribute) is not None


@functools.lru_cache(maxsize=1)
def follow(subject: Subject) -> Reductions:
    """The port's forwards, followed once."""
    reductions = Reductions(subject)
    reductions.run_all()
    return reductions


def _loaded(target: ast.expr) -> ast.expr:
    return (
        ast.copy_location(ast.Name(target.id, ast.Load()), target) if isinstance(target, ast.Name) else target
    )


def _keeps_heads(operator: str, call: ast.Call) -> bool:
    """Whether a decode attention returns heads, because it is given no output projection."""
    return operator == "attention_decode" and is_none(argument(call, "W_out"))


def _without_negation(test: ast.expr) -> ast.expr | None:
    """``a is b`` for ``a is not b``, ``a == b`` for ``a != b``; None for anything else."""
    if (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.ops[0], (ast.IsNot, ast.NotEq))
    ):
        op = ast.Is() if isinstance(test.ops[0], ast.IsNot) else ast.Eq()
        return ast.copy_location(ast.Compare(left=test.left, ops=[op], comparators=test.comparators), test)
    return None


def _several_ranks(test: ast.expr) -> bool | None:
    """Outcome of a comparison of a number of ranks with one, taken with more than one rank."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return None
    name, other, op = last_name(test.left), test.comparators[0], test.ops[0]
    if name not in WORLD_SIZES or not (isinstance(other, ast.Constant) and other.value == 1):
        return None
    if isinstance(op, (ast.Gt, ast.NotEq)):
        return True
    return False if isinstance(op, (ast.Eq, ast.LtE)) else None
