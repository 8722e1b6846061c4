"""The classes of Gemma 3n and Gemma 4, which have no declaration, and the features that stop them."""

from autoport.families.feature import Feature

KV_SHARING = (
    "these layers project queries only and read the cache of the last layer of their kind before them: no LayerSpec "
    "of their own, bind_kv_cache gives them that layer's tensors, and they write none"
)
VALUE_NORM = (
    "v * rsqrt(mean(v**2) + eps) in float32 for each head, after NF.qkv_proj and before the cache is written; "
    "queries and keys have theirs as in qwen3/, and the scores are not scaled (scaling 1)"
)
LAYER_EMBEDDINGS = (
    "a second vocabulary-sharded embedding (vllm_neuron.nn.embedding) plus a normed projection of the first, once by "
    "step; each layer takes its slice"
)


def _gemma4(prefix: str) -> tuple[Feature, ...]:
    """The features that Gemma 4 and Gemma 4 Unified share."""
    attention = f"{prefix}TextAttention"
    return (
        Feature(
            "head size and KV heads by kind of layer",
            attention,
            "self.head_dim = layer_config.head_dim",
            ("config", "attention", "weights"),
            "start from qwen3/ and give each layer its own head_dim and KV heads (per_layer_config), and a LayerSpec "
            "with them; the attention operators take heads up to 128, so compose wider ones of plain torch",
            nearest="qwen3",
        ),
        Feature(
            "a norm without weight on the values",
            attention,
            "self.v_norm =",
            ("attention",),
            VALUE_NORM,
        ),
        Feature(
            "values that are the keys, before their norm and rotation, in layers of full attention",
            attention,
            "self.use_alternative_attention =",
            ("attention", "weights"),
            "no v_proj is stored: load k_proj into the places of k and v of the fused weight",
            when="attention_k_eq_v",
        ),
        Feature(
            "keys and values of an earlier layer used again in the last num_kv_shared_layers",
            attention,
            "self.is_kv_shared_layer =",
            ("attention", "backbone", "weights"),
            KV_SHARING,
            when="num_kv_shared_layers > 0",
        ),
        Feature(
            "an MLP of twice the width in the layers that share keys and values",
            f"{prefix}TextMLP",
            "use_double_wide_mlp =",
            ("config", "mlp"),
            "NF.mlp as it is, with the intermediate size by layer",
            when="use_double_wide_mlp and num_kv_shared_layers > 0",
        ),
        Feature(
            "proportional RoPE in layers of full attention",
            f"{prefix}TextRotaryEmbedding",
            "ROPE_INIT_FUNCTIONS[rope_type]",
            ("rope",),
            "frequencies theta ** (-2i / head_dim) for the first partial_rotary_factor of the pairs, zero for the "
            "others; the half-split tables of NF.qkv_proj take them as they are",
        ),
        Feature(
            "each layer's output times a stored number (layer_scalar)",
            f"{prefix}TextDecoderLayer",
            "hidden_states *= self.layer_scalar",
            ("decoder", "weights"),
            "a parameter of one element by layer, multiplied at the layer's end; it cannot be folded, as the "
            "residual is scaled, too",
        ),
    )


REFUSED_GEMMA: dict[str, tuple[Feature, ...]] = {
    "Gemma3nForCausalLM": (
        Feature(
            "embeddings for each layer, gated into its output",
            "Gemma3nTextModel",
            "self.embed_tokens_per_layer =",
            ("backbone", "decoder", "weights"),
            LAYER_EMBEDDINGS,
        ),
        Feature(
            "AltUp: altup_num_inputs residual streams that each layer predicts and corrects",
            "Gemma3nTextAltUp",
            "",
            ("decoder", "backbone", "weights"),
            "plain torch on every rank, with small replicated matrices, around a layer with four norms, as in "
            "generated ports of Gemma3ForCausalLM",
        ),
        Feature(
            "Laurel: a low-rank path beside attention",
            "Gemma3nTextLaurelBlock",
            "",
            ("decoder", "weights"),
            "two replicated linears and an RMSNorm over the normed input, added to it; the sum with attention and "
            "residual is divided by sqrt(2)",
        ),
        Feature(
            "keys and values of an earlier layer used again in the last num_kv_shared_layers",
            "Gemma3nTextAttention",
            "self.is_kv_shared_layer =",
            ("attention", "backbone", "weights"),
            KV_SHARING,
            when="num_kv_shared_layers > 0",
        ),
        Feature(
            "a norm without weight on the values",
            "Gemma3nTextAttention",
            "self.v_norm =",
            ("attention",),
            VALUE_NORM,
            nearest="qwen3",
        ),
        Feature(
            "a gate of which only values far above the mean stay",
            "Gemma3nTextMLP",
            "def _gaussian_topk",
            ("mlp",),
            "relu(gate - mean - std * quantile), then the activation, in plain torch; mean and std are over "
            "intermediate_size: all-reduce sum and sum of squares over the TP group. NF.mlp fits the other layers",
            when="max(activation_sparsity_pattern) > 0",
        ),
        Feature(
            "intermediate sizes by layer",
            "Gemma3nTextMLP",
            "config.intermediate_size[layer_idx]",
            ("config", "mlp"),
            "NF.mlp as it is, with the size of the layer",
        ),
    ),
    "Gemma4ForCausalLM": (
        *_gemma4("Gemma4"),
        Feature(
            "embeddings for each layer, gated into its output",
            "Gemma4TextModel",
            "self.embed_tokens_per_layer =",
            ("backbone", "decoder", "weights"),
            LAYER_EMBEDDINGS,
            when="hidden_size_per_layer_input",
        ),
        Feature(
            "experts beside the MLP of the same layer, with norms of their own",
            "Gemma4TextDecoderLayer",
            "if self.enable_moe_block:",
            ("moe", "decoder", "weights"),
            "NF.mlp and the experts of qwen3_moe/ (NF.moe_cte), their outputs normed and added; the router reads the "
            "residual, normed without weight, times a vector and hidden_size ** -0.5, and multiplies the chosen "
            "weights by per_expert_scale",
            when="enable_moe_block",
            nearest="qwen3_moe",
        ),
    ),
    "Gemma4UnifiedForCausalLM": _gemma4("Gemma4Unified"),
}
