"""A tiny Eagle3 draft, and its logits in plain torch with transformers' Llama parts.

Written from the published semantics (vLLM's `llama_eagle3.py`), for one sequence without a cache.
"""

import json
from pathlib import Path
from typing import Any

import torch
from autoport.validation import reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

H, V, DRAFT_V = 256, 512, 128
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": LLAMA3,
    "vocab_size": V,
}
PUBLISHED = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "draft_vocab_size": DRAFT_V,
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "a-target"},
    },
    "draft_vocab_size": DRAFT_V,
    "norm_before_residual": True,
    "torch_dtype": "float32",
    "transformer_layer_config": {
        **{name: value for name, value in LAYER.items() if name not in ("rope_theta", "rope_scaling")},
        "rope_parameters": {**LLAMA3, "rope_theta": 10000.0},
    },
}


def tensors(
    own_embedding: bool = True, layer: str = "midlayer", hidden: int = H, vocab: int = V
) -> dict[str, Tensor]:
    """Random weights: peaked attention, norms away from one, a draft vocabulary of scattered tokens."""
    generator = torch.Generator().manual_seed(7)

    def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def norm() -> Tensor:
        return 1.0 + 0.4 * torch.randn(hidden, generator=generator)

    heads, kv = 4 * 64, 2 * 64
    chosen = torch.randperm(vocab, generator=generator)[:DRAFT_V].sort().values
    found = {
        "fc.weight": weight(hidden, 3 * hidden),
        f"{layer}.self_attn.q_proj.weight": weight(heads, 2 * hidden, 3.0),
        f"{layer}.self_attn.k_proj.weight": weight(kv, 2 * hidden, 3.0),
        f"{layer}.self_attn.v_proj.weight": weight(kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": weight(hidden, heads),
        f"{layer}.mlp.gate_proj.weight": weight(384, hidden),
        f"{layer}.mlp.up_proj.weight": weight(384, hidden),
        f"{layer}.mlp.down_proj.weight": weight(hidden, 384),
        **{
            f"{layer}.{name}.weight": norm()
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": norm(),
        "lm_head.weight": weight(DRAFT_V, hidden, 4.0),
        "d2t": chosen - torch.arange(DRAFT_V),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True),
    }
    return found | ({"embed_tokens.weight": weight(vocab, hidden, 8.0)} if own_embedding else {})


def norms() -> dict[str, Tensor]:
    """Weights of the norms that only some drafts have."""
    generator = torch.Generator().manual_seed(11)
    sizes = {"input_norm": 3 * H, **{f"fc_norm.{index}": H for index in range(3)}}
    return {
        f"{name}.weight": 1.0 + 0.4 * torch.randn(size, generator=generator) for name, size in sizes.items()
    }


@torch.no_grad()
def aux_states(model: Any, layers: list[int], ids: list[int]) -> Tensor:
    """What a target hands to a drafter: the inputs of these layers side by side [T, layers * H].

    Args:
        model: The target, a transformers model.
    """
    before_norm: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    num_layers = model.config.num_hidden_layers
    return torch.cat([before_norm[0] if layer == num_layers else states[layer] for layer in layers], dim=-1)[
        0
    ]


def fitted(model: Any, layers: list[int], prompts: list[list[int]], steps: int) -> dict[str, Tensor]:
    """Weights of a draft whose `fc` alone gives the token after the next one, in the target's own greedy runs.

    Args:
        steps: New tokens of each run.
    """
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    states, targets = [], []
    for prompt in prompts:
        ids = prompt + reference.greedy(model, prompt, steps + 2)
        states.append(aux_states(model, layers, ids)[len(prompt) - 1 : -2])
        targets += ids[len(prompt) + 1 :]
    others = [token for token in range(vocab) if token not in targets]
    chosen = torch.tensor(sorted([*set(targets), *others[: DRAFT_V - len(set(targets))]]))
    weights = tensors(own_embedding=False, hidden=hidden, vocab=vocab)
    rows = weights["lm_head.weight"][[chosen.tolist().index(token) for token in targets]]
    weights["fc.weight"] = torch.linalg.lstsq(torch.cat(states), rows, driver="gelsd").solution.T.contiguous()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"midlayer.{name}.weight"].zero_()
    weights["norm.weight"].fill_(1.0)
    return weights | {"d2t": chosen - torch.arange(DRAFT_V)}


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


class Reference:
    """The draft of a checkpoint folder, in one dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype, embed_tokens: Tensor | None = None):
        config = json.loads((folder / "config.json").read_text())
        self.asked = {**config, **config.get("eagle_config", {})}
        self.norm_before_residual = config.get("norm_before_residual", False)
        self.config = LlamaConfig(**config.get("transformer_layer_config", config))
        self.config._attn_implementation = "eager"
        stored = load_file(folder / "model.safetensors")
        self.d2t = stored["d2t"]
        floats = {name: value.to(dtype) for name, value in stored.items() if value.is_floating_point()}
        self.weights = {name.replace("layers.0.", "midlayer."): value for name, value in floats.items()}
        if embed_tokens is not None:
            self.weights["embed_tokens.weight"] = embed_tokens
        self.mlp = LlamaMLP(self.config).to(dtype)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(self.mlp, name).weight.data = self.weights[f"midlayer.mlp.{name}.weight"]
        self.rotary = LlamaRotaryEmbedding(self.config)

    def norm(self, name: str, x: Tensor) -> Tensor:
        module = LlamaRMSNorm(x.shape[-1], self.config.rms_norm_eps)
        module.weight.data = self.weights[f"{name}.weight"]
        return module(x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def layer(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """ids [T], hidden [T, H] -> the layer's output [T, H], before the last norm."""
        embeds = self.norm("midlayer.input_layernorm", self.weights["embed_tokens.weight"][ids])
        normed = self.norm("midlayer.hidden_norm", hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([embeds, normed], dim=-1)
        q, k, v = (
            self.linear(f"midlayer.self_attn.{name}_proj", x)
            .view(1, len(ids), -1, self.config.head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = self.rotary(v, torch.arange(len(ids))[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(len(ids), -1)
        hidden = residual + self.linear("midlayer.self_attn.o_proj", attended)
        return hidden + self.mlp(self.norm("midlayer.post_attention_layernorm", hidden))

    @torch.no_grad()
    def drafts(
        self, ids: list[int], states: Tensor, count: int, given: list[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """Drafts and their logits [count, draft vocabulary] after `ids`, which follow the tokens of states [T, 3*H].

        Args:
            given: Drafts to go on with in place of its own.
        """
        if self.asked.get("norm_before_fc"):
            states = self.norm("input_norm", states)
        if self.asked.get("fc_norm"):
            parts = states.chunk(3, dim=-1)
            states = torch.cat(
                [self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=-1
            )
        hidden = self.linear("fc", states)
        ids, tokens, all_logits = list(ids), [], []
        for step in range(count):
            output = self.layer(torch.tensor(ids), hidden)[-1:]
            normed = self.norm("norm", output)
            logits = self.linear("lm_head", normed)[0]
            best = int(logits.argmax())
            tokens.append(best + int(self.d2t[best]))
            all_logits.append(logits.float())
            ids.append(tokens[-1] if given is None else given[step])
            hidden = torch.cat([hidden, normed if self.asked.get("norm_output") else output])
        return tokens, torch.stack(all_logits)
