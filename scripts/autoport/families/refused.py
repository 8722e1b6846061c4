"""Decoder classes that have no declaration, and the features of each that stop it (as transformers 5 computes it)."""

from autoport.families.feature import Feature
from autoport.families.refused_gemma import REFUSED_GEMMA

COMPOSED = (
    "compose it: NF.qkv_proj, then the scores over the paged cache in plain torch, as generated ports of "
    "BloomForCausalLM do"
)


REFUSED: dict[str, tuple[Feature, ...]] = {
    **REFUSED_GEMMA,
    "BitNetForCausalLM": (
        Feature(
            "an RMSNorm over all heads' outputs, before o_proj",
            "BitNetAttention",
            "self.attn_sub_norm =",
            ("attention",),
            f"NF.attention_decode projects in the same call, so {COMPOSED}; the norm is over hidden_size: all-reduce "
            "the sum of squares over the TP group, then NF.o_proj",
        ),
        Feature(
            "an RMSNorm in the MLP, before down_proj",
            "BitNetMLP",
            "self.ffn_sub_norm =",
            ("mlp",),
            "NF.mlp has no place for it: gate, up and the activation in plain torch, the norm over intermediate_size "
            "(all-reduce the sum of squares over the TP group), then down_proj",
        ),
    ),
    "CohereCompassForCausalLM": (
        Feature(
            "RoPE frequencies in the order of M-RoPE (height and width first), for text, too",
            "CohereCompassRotaryEmbedding",
            "inv_freq_3d[:hw_dim]",
            ("rope",),
            "of the frequencies but the last mrope_section[2] take those with an even place, then those with an odd "
            "one, then the last ones; half-split tables for NF.qkv_proj. The rest is a layer of Cohere2ForCausalLM, "
            "which is ported, with half-split pairs: LayerNorm without bias, attention and MLP in parallel",
        ),
    ),
    "DbrxForCausalLM": (
        Feature(
            "the rows of all experts stacked in one matrix (w1, v1, w2)",
            "DbrxExpertGLU",
            "self.w1 = nn.Parameter",
            ("moe", "weights"),
            "a loader that views each as [E, I, H]: w1 and v1 become gate_up [E, H, 2, I] of NF.moe_cte, w2 is its "
            "down [E, I, H] already; router and experts as in qwen3_moe/",
            nearest="qwen3_moe",
        ),
        Feature(
            "sizes in sub-configs (attn_config, ffn_config)",
            "DbrxAttention",
            "attn_config = config.attn_config",
            ("config",),
            "read kv_n_heads, clip_qkv and rope_theta from attn_config, sizes and counts of experts from ffn_config; "
            "clamp q, k and v after NF.qkv_proj, as generated ports of OlmoeForCausalLM do",
        ),
        Feature(
            "the chosen experts' weights divided by a p-norm that is no sum",
            "DbrxFFN",
            "p=self.moe_normalize_expert_weights",
            ("moe",),
            "after NF.router, in float32",
            when="ffn_config.moe_normalize_expert_weights not in (None, 1)",
        ),
    ),
    "DeepseekV4ForCausalLM": (
        Feature(
            "attention over a window and over compressed keys (CSA and HCA)",
            "DeepseekV4Attention",
            "COMPRESSOR_CLASSES[self.layer_type]",
            ("attention", "backbone"),
            "a cache of the window, and one of the entries that each compress_rate tokens become, beside it; scores "
            "in plain torch over both. No operator or reference model of the workspace compresses keys",
        ),
        Feature(
            "an indexer that picks compressed entries for each query",
            "DeepseekV4Indexer",
            "",
            ("attention",),
            "deepseek_v32/ has one for keys that are not compressed",
            nearest="deepseek_v32",
        ),
        Feature(
            "one tensor for keys and values, whose rotation is undone in the output",
            "DeepseekV4Attention",
            "cos, -sin",
            ("attention", "rope"),
            "one KV head for all queries, replicated under TP; rotate the last dimensions of a head, interleaved, "
            "and turn the heads' outputs back by the query's position. Queries come through q_a_proj and q_b_proj, "
            "each with a norm",
        ),
        Feature(
            "an output projection in groups of heads, then one of low rank",
            "DeepseekV4GroupedLinear",
            "",
            ("attention", "weights"),
            "torch.bmm over the groups of this rank, then o_b_proj as a row-parallel product that is reduced once",
        ),
        Feature(
            "hyper-connections: hc_mult residual streams, mixed by doubly stochastic matrices",
            "DeepseekV4HyperConnection",
            "",
            ("decoder", "backbone", "head"),
            "plain torch in float32 around attention and MLP; the backbone repeats the embeddings hc_mult times, and "
            "hc_head joins the streams before the last norm",
        ),
        Feature(
            "experts chosen by a table over token ids, in layers of hash_moe",
            "DeepseekV4HashRouter",
            "self.tid2eid[",
            ("moe", "decoder"),
            "pass the token ids down to the layer; scores as in NF.router, without its top-k",
            when="'hash_moe' in mlp_layer_types",
        ),
        Feature(
            "gate and up clamped before the product (swiglu_limit)",
            "DeepseekV4MLP",
            "self.limit = config.swiglu_limit",
            ("mlp", "moe"),
            "gpt_oss/ clamps in its experts; NF.mlp does not, so compose the shared expert of plain torch",
        ),
    ),
    "DiffLlamaForCausalLM": (
        Feature(
            "differential attention: a second half of the heads is subtracted, times a learned lambda",
            "DiffLlamaAttention",
            "lambda_full = lambda_1 - lambda_2",
            ("attention",),
            f"{COMPOSED}; head h reads the values of two halves of the KV heads, and head h + N/2 is subtracted from "
            "it: all-gather values and outputs over the TP group, norm over 2 * head_dim, then NF.o_proj",
        ),
    ),
    "DogeForCausalLM": (
        Feature(
            "scores with a bias that each key's values give, and only the largest keep_window_size keys",
            "DogeAttention",
            "self.A = nn.Parameter",
            ("attention",),
            f"{COMPOSED}; dt_proj reads the values of all KV heads: all-gather them over the TP group. Queries and "
            "keys have norms as in qwen3/",
        ),
        Feature(
            "a learned weight on each residual",
            "DogeDecoderLayer",
            "self.input_residual =",
            ("decoder",),
            "multiply the residual by the vector [H] before each of the two sums",
        ),
        Feature(
            "experts of one row each, found by the sum of two keys (DogeCDMoE)",
            "DogeCDMoE",
            "self.down_embed =",
            ("moe", "weights"),
            "no expert operator fits: gather the rows of down_embed and up_embed, in plain torch. The class views "
            "the router's logits as [2, tokens, keys], so its choice depends on the other tokens of a batch",
            when="is_moe",
            nearest="qwen3_moe",
        ),
    ),
    "GPTNeoXJapaneseForCausalLM": (
        Feature(
            "a bias on the attention's output in the last layer only",
            "GPTNeoXJapaneseAttention",
            "self.dense_bias =",
            ("attention", "weights"),
            "a parameter of the last layer alone, added once after the reduction of o_proj. The rest is a layer of "
            "GPTNeoXForCausalLM, which is ported, without biases, sequential, with tied embeddings",
        ),
    ),
    "JetMoeForCausalLM": (
        Feature(
            "a mixture of experts inside the attention: the router picks query and output projections",
            "JetMoeMoA",
            "",
            ("attention", "weights"),
            "project q of the chosen experts with a gather of their weights in plain torch; kv_proj alone gives keys "
            "and values; the outputs go through the same experts, times the router's weights, plus a bias once",
            nearest="qwen3_moe",
        ),
        Feature(
            "query heads that share the KV heads in the order of the experts",
            "JetMoeAttention",
            "key_states.repeat(1, self.top_k, 1, 1)",
            ("attention",),
            "query head e * Nkv + h reads KV head h, where NF.flash_attention takes neighbours: swap the two "
            "dimensions of the heads before and after it",
        ),
        Feature(
            "a bias on the experts' sum",
            "JetMoeMoE",
            "layer_output + self.bias",
            ("moe", "weights"),
            "added once, after the reduction of the experts of qwen3_moe/ (NF.moe_cte)",
            nearest="qwen3_moe",
        ),
    ),
    "Llama4ForCausalLM": (
        Feature(
            "attention in chunks of attention_chunk_size",
            "Llama4TextModel",
            "create_chunked_causal_mask(",
            ("attention", "backbone"),
            "a token sees its own chunk up to itself (chunk_size of LayerSpec): NF.flash_attention by chunk in "
            "prefill; in decode a mask whose start_pos is the chunk's first token (NF.gen_attention_decode_mask)",
            when="'chunked_attention' in layer_types",
        ),
        Feature(
            "experts whose input, not output, is multiplied by the router's score",
            "Llama4TextMoe",
            "routed_in = routed_in * router_scores",
            ("moe",),
            "sigmoid of the chosen logits as affinities; NF.moe_cte with ExpertAffinityScaleMode.PRE_SCALE in "
            "prefill; the decode operators scale the output only, so compose decode of plain torch; the shared "
            "expert is NF.mlp",
            nearest="gpt_oss",
        ),
    ),
    "MiMoV2FlashForCausalLM": (
        Feature(
            "twice the KV heads in layers with a window",
            "MiMoV2FlashAttention",
            "config.num_key_value_heads * 2",
            ("config", "attention", "weights"),
            "give each layer its own KV heads, and a LayerSpec with them",
            nearest="gpt_oss",
        ),
        Feature(
            "sinks only in layers with a window",
            "MiMoV2FlashAttention",
            "self.sinks = nn.Parameter",
            ("attention", "weights"),
            "gpt_oss/ has sinks in each layer (sink of NF.flash_attention); leave the parameter out of the others",
        ),
        Feature(
            "values narrower than keys (v_head_dim)",
            "MiMoV2FlashAttention",
            "self.v_head_dim = config.v_head_dim",
            ("config", "attention", "weights"),
            "the fused operators have one head size: load v and o_proj padded with zeros to head_dim",
            when="v_head_dim != head_dim",
        ),
        Feature(
            "values times attention_value_scale",
            "MiMoV2FlashAttention",
            "self.v_scale =",
            ("weights",),
            "fold it into v_proj at load time",
            when="attention_value_scale not in (None, 1)",
        ),
    ),
    "MiniMaxM3VLForCausalLM": (
        Feature(
            "sparse attention: an indexer picks blocks of keys for each query",
            "MiniMaxM3VLIndexer",
            "",
            ("attention", "backbone", "weights"),
            "a second cache of the indexer's keys, scores and the top blocks in plain torch, then a mask over the "
            "paged cache; deepseek_v32/ picks single keys",
            when="'minimax_m3_sparse' in layer_types",
            nearest="deepseek_v32",
        ),
        Feature(
            "clamped SwiGLU with (up + 1), in experts, shared expert and dense layers",
            "MiniMaxM3VLDenseMLP",
            "gate.clamp(max=self.swiglu_limit)",
            ("mlp", "moe"),
            "the experts as in gpt_oss/: an up bias of 1 with the clamps moved by it, Swish for g * sigmoid(1.702 g) "
            "(gate and up are not interleaved). NF.mlp does not clamp: compose dense MLP and shared expert of torch",
            nearest="gpt_oss",
        ),
    ),
    "ModernBertDecoderForCausalLM": (
        Feature(
            "a dense layer, an activation and a norm before the head",
            "ModernBertDecoderPredictionHead",
            "self.norm(self.act(self.dense(hidden_states)))",
            ("head", "weights"),
            "a replicated linear [H, H] in plain torch, the activation and the norm, then ColumnParallelLinear with "
            "the bias of decoder",
        ),
        Feature(
            "no norm before the attention of the first layer",
            "ModernBertDecoderLayer",
            "else nn.Identity()",
            ("decoder", "weights"),
            "leave attn_norm out of layer 0; the embeddings are normed as in generated ports of BloomForCausalLM",
        ),
    ),
}
