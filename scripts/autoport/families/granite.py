"""Granite: scales on attention, embeddings, residuals and logits."""

from msgspec.structs import replace

from autoport.families.family import Family
from autoport.families.llama import WINDOW_BY_TYPE
from autoport.families.moe_style import MoeKeys, MoeStyle

ROPE_LABELS = "['rope' if theta else None for theta in layer_rope_theta]"
ONE_THETA = (
    "len([theta for theta in layer_rope_theta if theta and theta != rope_parameters['rope_theta']]) == 0",
    "SCOPE-ROPE",
    "layers with a theta of their own",
)
MOE_KEYS = MoeKeys(
    router="block_sparse_moe.router.layer",
    gate_up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
    shared_gate_up="shared_mlp.input_linear",
    shared_down="shared_mlp.output_linear",
)
MOE = MoeStyle(
    keys=MOE_KEYS,
    layout="stacked",
    num_experts="num_local_experts",
    intermediate_size="intermediate_size",
    score_over="'chosen'",
    normalise="False",
)

GRANITE = Family(
    model_type="granite",
    hf_name="GraniteForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    scale="attention_multiplier",
    embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    logit_scale="1 / logits_scaling",
)

GRANITE_FAMILIES = [
    GRANITE,
    replace(
        GRANITE,
        model_type="granite_swa",
        hf_name="GraniteSWAForCausalLM",
        sinks="True",
        windows=WINDOW_BY_TYPE,
        rope_labels=ROPE_LABELS,
        requires=(ONE_THETA,),
    ),
    replace(
        GRANITE,
        model_type="granitemoe",
        hf_name="GraniteMoeForCausalLM",
        mlp_bias="False",
        moe=MOE,
    ),
    replace(
        GRANITE,
        model_type="granitemoeshared",
        hf_name="GraniteMoeSharedForCausalLM",
        mlp_bias="False",
        moe=replace(MOE, shared_size="shared_intermediate_size"),
    ),
    replace(
        GRANITE,
        model_type="granitemoe_swa",
        hf_name="GraniteMoeSWAForCausalLM",
        mlp_bias="False",
        sinks="True",
        windows=WINDOW_BY_TYPE,
        rope_labels=ROPE_LABELS,
        requires=(ONE_THETA,),
        moe=replace(
            MOE,
            keys=replace(
                MOE_KEYS,
                router="block_sparse_moe.router",
                gate_up="block_sparse_moe.experts.gate_up_proj",
                down="block_sparse_moe.experts.down_proj",
            ),
            shared_size="shared_intermediate_size",
        ),
    ),
]
