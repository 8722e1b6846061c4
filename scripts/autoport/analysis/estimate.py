"""Tensor-parallel sizes of a model of which only the config is known."""

from collections.abc import Sequence

from autoport.analysis.tensor_parallel import Dimensions, estimate_weight_bytes, plan_tensor_parallel
from autoport.errors import refuse
from autoport.research.config import load_config, read_facts
from autoport.research.source import open_source
from autoport.schema import Facts, TpPlan

# Config keys of layouts whose sizes the five rules do not see here.
OTHER_LAYOUTS = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_intermediate_size": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "multi_query": "multi-query attention",
    "block_configs": "layers of different shapes",
}


def estimate_tensor_parallel(
    source_name: str, context_length: int, batch_size: int, relax: Sequence[str]
) -> tuple[Facts, TpPlan]:
    """Plan TP sizes of a dense decoder with a gated MLP, its weights estimated from the config.

    Raises:
        Refusal: what `read_facts` refuses, and SCOPE-LAYOUT for a model that is not such a decoder.
    """
    source = open_source(source_name)
    config = load_config(source)
    for key, layout in OTHER_LAYOUTS.items():
        if config.get(key):
            raise refuse(
                "SCOPE-LAYOUT",
                f"{key} is {config[key]!r:.80}: {layout}",
                source.config_file,
                "sizes are computed for dense decoders only",
            )
    facts = read_facts(source, config)
    dtype = facts.fields.get("dtype")
    element_bytes = 4 if dtype and dtype.value == "float32" else 2
    size = Dimensions.from_facts(facts)
    weights = estimate_weight_bytes(size, element_bytes)
    return facts, plan_tensor_parallel(size, weights, context_length, batch_size, relax)
