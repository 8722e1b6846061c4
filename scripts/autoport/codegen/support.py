"""Which parameters the generated model has."""

from autoport.analysis.moe import has_dense_layers
from autoport.codegen.moe import moe_parameters
from autoport.errors import Problem, Refusal
from autoport.families.family import NORM_NAMES
from autoport.schema.architecture import Architecture, Norm
from autoport.schema.plan import Plan

LAYER = "model.layers.{i}"


def check_plan(plan: Plan) -> None:
    """Check that the plan can be generated.

    Raises:
        Refusal: GEN-WEIGHTS for each difference between the weight map and the model's parameters and their
            loaders.
    """
    problems = []
    expected = parameters(plan.architecture)
    expected |= {item.name: "replicated" for gap in plan.gaps for item in gap.parameters}
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
    attention, mlp, qk_norm = architecture.attention, architecture.mlp, architecture.attention.qk_norm
    dense = has_dense_layers(architecture)
    norms = [f"{LAYER}.{name}" for name in NORM_NAMES[architecture.block.topology]]
    norms += ["model.norm"] if architecture.final_norm else []
    norms += ["model.embed_norm"] if architecture.embedding.norm else []
    names = {
        "model.embed_tokens.weight": "vocab",
        f"{LAYER}.self_attn.qkv_proj_weight": "fused_qkv",
        f"{LAYER}.self_attn.o_proj_weight": "row",
        "lm_head.weight": "vocab",
    }
    optional = {
        "model.embed_positions": (architecture.embedding.positions == "learned", "replicated"),
        f"{LAYER}.self_attn.qkv_proj_bias": (attention.qkv_bias, "fused_qkv_bias"),
        f"{LAYER}.self_attn.o_proj_bias": (attention.o_bias, "row_bias"),
        f"{LAYER}.self_attn.sinks": (attention.sinks, "heads"),
        f"{LAYER}.self_attn.output_gate_weight": (attention.output_gate is not None, "column"),
        f"{LAYER}.mlp.up_proj_weight": (dense, "column"),
        f"{LAYER}.mlp.down_proj_weight": (dense, "row"),
        f"{LAYER}.mlp.gate_proj_weight": (dense and mlp.kind == "gated", "column"),
        f"{LAYER}.mlp.gate_proj_bias": (dense and mlp.kind == "gated" and mlp.bias, "column_bias"),
        f"{LAYER}.mlp.up_proj_bias": (dense and mlp.bias, "column_bias"),
        f"{LAYER}.mlp.down_proj_bias": (dense and mlp.bias, "row_bias"),
        "lm_head.bias": (architecture.head.bias, "column_bias"),
    }
    names |= {name: transform for name, (present, transform) in optional.items() if present}
    names |= moe_parameters(architecture)
    names |= {f"{norm}.{kind}": "replicated" for norm in norms for kind in norm_parameters(architecture.norm)}
    if mlp.activation == "xielu":
        names |= {f"{LAYER}.mlp.{name}": "replicated" for name in ("alpha_p", "alpha_n", "beta", "eps")}
    for part in ("q", "k") if qk_norm else ():
        split = "replicated" if qk_norm and qk_norm.width == "head" else f"{part}_heads".replace("k_", "kv_")
        for kind in norm_parameters(qk_norm.norm) if qk_norm else ():
            names[f"{LAYER}.self_attn.{part}_norm_{kind}"] = split
    return names


def norm_parameters(norm: Norm) -> list[str]:
    """Names of a norm's parameters."""
    return (["weight"] if norm.weight != "none" else []) + (["bias"] if norm.bias else [])
