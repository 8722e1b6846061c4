"""Which expressions of a function are tensors, as far as can be told without running it."""

import ast
import re

from autoport.review.parameters import declaration
from autoport.review.source import Function, PortSource
from autoport.review.syntax import dotted, self_attribute, walk

# Arguments of a forward that the runner passes as tensors, and what ports usually name them further down.
TENSOR_ARGUMENTS = {
    "input_ids",
    "positions",
    "hidden_states",
    "inputs_embeds",
    "sampling_positions",
    "sampling_params",
}

# Entries of a layer's attention metadata that are tensors; the others are Python ints.
TENSOR_METADATA = {
    "block_table_tensor", "slot_mapping", "cached_seq_len", "full_block_table_tensor", "swa_kv_pos_offset",
}  # fmt: skip

# Methods and functions of tensors whose result is no tensor.
NOT_TENSORS = {
    "size", "dim", "numel", "nelement", "ndimension", "stride", "item", "tolist", "element_size", "type",
    "is_contiguous", "data_ptr", "get_device", "is_floating_point", "is_tensor", "device", "Size", "finfo",
    "iinfo", "dtype", "no_grad", "inference_mode", "compile", "is_grad_enabled", "manual_seed",
}  # fmt: skip


class Tensors:
    """The names of a function that hold tensors."""

    def __init__(self, source: PortSource, function: Function):
        self.source = source
        self.function = function
        self.names = {
            argument.arg
            for argument in (*function.node.args.args, *function.node.args.kwonlyargs)
            if argument.arg in TENSOR_ARGUMENTS or _is_tensor_annotation(argument.annotation)
        }
        # Twice, because a loop can use a name before the line that first assigns it.
        for _ in range(2):
            for node in walk(function.node):
                if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        self._assign(target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and self.is_tensor(value):
            self.names.add(target.id)
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for item, part in zip(target.elts, value.elts, strict=True):
                self._assign(item, part)
        elif isinstance(target, ast.Tuple) and self.is_tensor(value):
            self.names |= {item.id for item in target.elts if isinstance(item, ast.Name)}

    def is_tensor(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            attribute = self_attribute(node)
            if attribute and self.function.owner:
                return attribute in ("k_cache", "v_cache") or bool(
                    declaration(self.source, self.function.owner, attribute)
                )
            return node.attr in ("T", "mT", "data", "real", "imag") and self.is_tensor(node.value)
        if isinstance(node, ast.Subscript):
            return self.is_tensor(node.value) or _metadata_key(node.slice) in TENSOR_METADATA
        if isinstance(node, ast.Call):
            return self._is_tensor_call(node)
        if isinstance(node, ast.BinOp):
            return self.is_tensor(node.left) or self.is_tensor(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.is_tensor(node.operand)
        if isinstance(node, ast.Compare):
            identity = all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
            return not identity and any(self.is_tensor(item) for item in (node.left, *node.comparators))
        if isinstance(node, ast.BoolOp):
            return any(self.is_tensor(item) for item in node.values)
        if isinstance(node, ast.IfExp):
            return self.is_tensor(node.body) or self.is_tensor(node.orelse)
        return False

    def _is_tensor_call(self, call: ast.Call) -> bool:
        target = call.func
        if not isinstance(target, ast.Attribute) or target.attr in NOT_TENSORS:
            return False
        if target.attr == "get" and call.args:
            return _metadata_key(call.args[0]) in TENSOR_METADATA
        if re.fullmatch(r"(torch|torch\.nn\.functional|F|NF)\.(?!is_)\w+", dotted(target)):
            return True
        return self.is_tensor(target.value)


def _is_tensor_annotation(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    text = ast.unparse(annotation)
    return text in ("torch.Tensor", "Tensor") or any(
        text == form
        for name in ("torch.Tensor", "Tensor")
        for form in (f"{name} | None", f"None | {name}", f"Optional[{name}]", f"typing.Optional[{name}]")
    )


def _metadata_key(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
