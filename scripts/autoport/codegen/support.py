"""What the templates can express, and which parameters the generated model has."""

from autoport.errors import Problem, Refusal
from autoport.schema import Architecture, Plan

LAYER = "model.layers.{i}"


def check_plan(plan: Plan) -> None:
    """Check that the plan can be generated.

    Raises:
        Refusal: GEN-FEATURE for each feature without a template, GEN-WEIGHTS for each difference between the
            weight map and the model's parameters and their loaders.
    """
    problems = [
        Problem(
            rule="GEN-FEATURE",
            found=f"{feature} has no template",
            where="plan.json: architecture",
            next_step="write that section by hand, or port another model",
        )
        for feature in _unsupported(plan.architecture)
    ]
    expected = parameters(plan.architecture)
    mapped = {entry.parameter: entry.transform for entry in plan.weights.entries}
    for name in expected.keys() | mapped.keys():
        if expected.get(name) != mapped.get(name):
            problems.append(
                Problem(
                    rule="GEN-WEIGHTS",
                    found=f"{name}: loaded as {expected.get(name)}, mapped as {mapped.get(name)}",
                    where="plan.json: weights",
                    next_step="run 'autoport analyze' again; the checkpoint may not be of this architecture",
                )
            )
    if problems:
        raise Refusal(*sorted(problems, key=str))


def parameters(architecture: Architecture) -> dict[str, str]:
    """Parameters of the generated model and the transform (see `WeightEntry`) of each one's loader."""
    names = {
        "model.embed_tokens.weight": "vocab",
        f"{LAYER}.input_layernorm.weight": "replicated",
        f"{LAYER}.self_attn.qkv_proj_weight": "fused_qkv",
        f"{LAYER}.self_attn.o_proj_weight": "row",
        f"{LAYER}.post_attention_layernorm.weight": "replicated",
        f"{LAYER}.mlp.gate_proj_weight": "column",
        f"{LAYER}.mlp.up_proj_weight": "column",
        f"{LAYER}.mlp.down_proj_weight": "row",
        "model.norm.weight": "replicated",
        "lm_head.weight": "vocab",
    }
    if architecture.attention.qkv_bias:
        names[f"{LAYER}.self_attn.qkv_proj_bias"] = "fused_qkv_bias"
    return names


def _unsupported(architecture: Architecture) -> list[str]:
    features = {
        "a bias on the attention's output projection": architecture.attention.o_bias,
        "a bias in the MLP": architecture.mlp.bias,
    }
    return [feature for feature, present in features.items() if present]
