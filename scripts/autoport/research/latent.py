"""The fields of multi-head latent attention, and of its sparse indexer."""

from autoport.research.fields import Resolver, is_integer
from autoport.schema.facts import Fact

REQUIRED = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
INDEXER = ("index_n_heads", "index_head_dim", "index_topk")


def resolve_latent(resolver: Resolver) -> dict[str, Fact]:
    """Facts of latent attention: ranks, head sizes, and `qk_head_dim`; empty for other attention."""
    rank = resolver.optional("kv_lora_rank", is_integer, strict=True)
    if rank is None:
        return {}
    found: dict[str, Fact] = {"kv_lora_rank": rank}
    query = resolver.optional("q_lora_rank", is_integer, strict=True)
    if query:
        found["q_lora_rank"] = query
    for name in REQUIRED:
        fact = resolver.required(name, is_integer)
        if fact:
            found[name] = fact
    for name in INDEXER:
        fact = resolver.optional(name, is_integer, strict=True)
        if fact:
            found[name] = fact
    if "qk_nope_head_dim" in found and "qk_rope_head_dim" in found:
        width = found["qk_nope_head_dim"].value + found["qk_rope_head_dim"].value
        wrong = is_integer(width)
        if wrong:
            text = f"qk_nope_head_dim + qk_rope_head_dim {wrong}"
            resolver.problem("CFG-TYPE", text, "correct them in config.json")
            return found
        found["qk_head_dim"] = Fact(width, "derived: qk_nope_head_dim + qk_rope_head_dim")
    return found
