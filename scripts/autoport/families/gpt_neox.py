"""GPT-NeoX, GPT-J, CodeGen and Falcon: rotary positions, attention and MLP in parallel."""

from autoport.families.family import Family, Keys

GPTJ_KEYS = Keys(
    bases=("transformer.", ""),
    layers="h",
    embedding="wte",
    final_norm="ln_f",
    norms=("ln_1",),
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    o="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    ignored=(
        (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", "the causal mask; older versions saved it"),
        (r"(transformer\.)?h\.\d+\.attn\.causal_mask", "the causal mask; older versions saved it"),
    ),
)

GPT_NEOX_FAMILIES = [
    Family(
        model_type="gpt_neox",
        hf_name="GPTNeoXForCausalLM",
        keys=Keys(
            bases=("gpt_neox.", ""),
            embedding="embed_in",
            head="embed_out",
            final_norm="final_layer_norm",
            qkv="attention.query_key_value",
            o="attention.dense",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            ignored=(
                (
                    r"(gpt_neox\.)?layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
                    "mask and frequencies; older versions saved them",
                ),
            ),
        ),
        norm="layer",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qkv_layout="'groups'",
        topology="'parallel_two_norms' if use_parallel_residual else 'pre_norm'",
        partial_rotary_factor=0.25,
        mlp="plain",
    ),
    Family(
        model_type="gptj",
        hf_name="GPTJForCausalLM",
        keys=GPTJ_KEYS,
        norm="layer",
        head_bias=True,
        topology="'parallel'",
        pairing="interleaved",
        rotary_dim="rotary_dim",
        float32_scores=True,
        mlp="plain",
    ),
    Family(
        model_type="codegen",
        hf_name="CodeGenForCausalLM",
        keys=Keys(
            bases=GPTJ_KEYS.bases,
            layers="h",
            embedding="wte",
            final_norm="ln_f",
            norms=("ln_1",),
            qkv="attn.qkv_proj",
            o="attn.out_proj",
            up="mlp.fc_in",
            down="mlp.fc_out",
            ignored=GPTJ_KEYS.ignored,
        ),
        norm="layer",
        head_bias=True,
        qkv_layout="'codegen'",
        topology="'parallel'",
        pairing="interleaved",
        rotary_dim="rotary_dim",
        float32_scores=True,
        mlp="plain",
    ),
    Family(
        model_type="falcon",
        hf_name="FalconForCausalLM",
        keys=Keys(
            bases=("transformer.", ""),
            layers="h",
            embedding="word_embeddings",
            final_norm="ln_f",
            qkv="self_attention.query_key_value",
            o="self_attention.dense",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            norms={"parallel_two_norms": ("ln_attn", "ln_mlp")},
        ),
        norm="layer",
        qkv_bias="bias",
        o_bias="bias",
        mlp_bias="bias",
        qkv_layout="'concat' if multi_query and not new_decoder_architecture else 'groups'",
        topology=(
            "('parallel_two_norms' if new_decoder_architecture and num_ln_in_parallel_attn != 1 else 'parallel')"
            " if new_decoder_architecture or parallel_attn else 'pre_norm'"
        ),
        rotary="not alibi",
        mlp="plain",
        requires=(("not alibi", "SCOPE-ALIBI", "ALiBi added before the scale"),),
    ),
]
