"""Classes that have no declaration, and the feature of each that stops it (as transformers 5 computes it)."""

REFUSED: dict[str, str] = {
    "DbrxForCausalLM": (
        "sub-configs for attention and experts, which config expressions do not read, and experts whose rows "
        "are stacked in one matrix (DbrxExpertGLU)"
    ),
    "DeepseekV4ForCausalLM": (
        "compressed sparse attention with shared keys and values, hyper-connections, and a router by token id"
    ),
    "JetMoeForCausalLM": "a mixture of experts inside the attention (JetMoeMoA)",
    "Llama4ForCausalLM": (
        "chunked attention, and routed experts whose input, not output, is weighted (Llama4TextMoe)"
    ),
    "MiMoV2FlashForCausalLM": (
        "KV heads, sinks and head sizes that differ between kinds of layers, and values narrower than keys "
        "(MiMoV2FlashAttention)"
    ),
    "MiniMaxM3VLForCausalLM": "a sparse-attention indexer, and experts clamped with another swiglu form",
}
