"""How a router picks experts and weighs them."""

import ast
from collections.abc import Iterator

from autoport.research.modeling.classes import Decoder
from autoport.schema.facts import Finding

NAMES = ("Router", "Gate", "TopKRouter", "SparseMoeBlock", "MoE", "Moe", "TopKGating")


def router_findings(decoder: Decoder) -> Iterator[Finding]:
    """One finding for each class that takes a top-k: score, order, bias, groups, renormalisation, scale, dtype."""
    for node in decoder.classes.values():
        if not node.name.endswith(NAMES):
            continue
        methods = [
            item for item in node.body if isinstance(item, ast.FunctionDef) and item.name != "__init__"
        ]
        text = "\n".join(ast.unparse(item) for item in methods)
        helpers = [decoder.functions[name] for name in decoder.functions if f"{name}(" in text]
        text += "\n" + "\n".join(ast.unparse(item) for item in helpers if "sparsemixer" in item.name)
        if "topk(" not in text and "sparsemixer" not in text:
            continue
        yield Finding("router", node.name, read_router(text), decoder.where(methods[0] if methods else node))


def read_router(text: str) -> dict[str, object]:
    """The routing as fields.

    `score`: the function of the logits. `order`: whether it comes before or after the top-k. `selection_bias`:
    a bias that only selects. `groups`: experts are limited to groups first. `renormalised`: always, never, or on
    the flag named. `scaled`: the weights are multiplied by a factor. `float32`: what is computed in float32.
    """
    score = "sparsemixer" if "sparsemixer" in text else "softmax"
    for name in ("sigmoid", "softplus"):
        if name in text and "shared_expert_gate" not in text:
            score = "sqrt of softplus" if name == "softplus" else name
            break
    found = [text.find(form) for form in ("softmax(", "sigmoid(", "softplus(") if form in text]
    first, top = min(found, default=-1), text.find("topk(")
    divides = any(form in text for form in ("/ denominator", "/= denominator", ".sum(dim=-1", ".sum(-1"))
    divides = divides and any(f in text for f in ("/=", "/ ")) and (".sum(" in text)
    flag = next((name for name in ("norm_topk_prob", "route_norm", "renormalize") if name in text), "")
    after = not 0 <= first < top
    divides = divides or (after and score == "softmax")  # a softmax over the chosen ones sums to one
    return {
        "score": score,
        "order": "top-k, then score" if after else "score, then top-k",
        "selection_bias": any(word in text for word in ("correction_bias", "expert_bias", "moe_statics(")),
        "groups": "group_mask" in text or "topk_group" in text,
        "renormalised": f"if {flag}" if flag else "always" if divides else "no",
        "scaled": any(word in text for word in ("routed_scaling_factor", "route_scale")),
        "float32": _float32(text),
    }


def _float32(text: str) -> str:
    linear = (
        "hidden_states.type(torch.float32)",
        "hidden_states.float()",
        "self.weight.float()",
        "weight.type(torch.float32)",
    )
    if any(form in text for form in linear):
        return "logits and scores"
    if any(
        form in text for form in ("dtype=torch.float", "router_logits.float()", "logits.float()", ".float()")
    ):
        return "scores"
    return "nothing"
