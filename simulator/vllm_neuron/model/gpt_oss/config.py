"""Configuration of the gpt_oss model."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_neuron.model.neuron_config import NeuronConfig


class UnsupportedConfigError(ValueError):
    """The configuration asks for something that this model's implementations do not do."""


@dataclass
class GptOssConfig:
    """What the implementation reads of the Hugging Face config. Nothing has a default: the config decides."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float
    num_key_value_heads: int
    head_dim: int
    rope_parameters: dict[str, Any]
    layer_windows: list[int | None]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    expert_clamp: float
    torch_dtype: torch.dtype
    neuron_config: NeuronConfig | None = None

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: NeuronConfig | None = None) -> "GptOssConfig":
        """Read a Hugging Face config.

        Raises:
            AttributeError: A field is missing.
            UnsupportedConfigError: The dtype is missing or not a torch dtype.
        """
        head_dim = getattr(hf_config, "head_dim", None)
        if head_dim is None:
            head_dim = hf_config.hidden_size // hf_config.num_attention_heads
        return cls(
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            num_hidden_layers=hf_config.num_hidden_layers,
            num_attention_heads=hf_config.num_attention_heads,
            rms_norm_eps=hf_config.rms_norm_eps,
            num_key_value_heads=hf_config.num_key_value_heads,
            head_dim=head_dim,
            rope_parameters=hf_config.rope_parameters,
            layer_windows=[
                hf_config.sliding_window if kind == "sliding_attention" else None
                for kind in hf_config.layer_types
            ],
            num_experts=hf_config.num_local_experts,
            num_experts_per_tok=hf_config.num_experts_per_tok,
            moe_intermediate_size=hf_config.intermediate_size,
            expert_clamp=hf_config.swiglu_limit,
            torch_dtype=_torch_dtype(hf_config),
            neuron_config=neuron_config,
        )


def _torch_dtype(hf_config: Any) -> torch.dtype:
    dtype = hf_config.dtype if hasattr(hf_config, "dtype") else hf_config.torch_dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedConfigError(
            f"the config's dtype is {dtype!r} (possible: bfloat16, float16, float32)"
        )
    return dtype


def checkpoint_format(hf_config: Any) -> str | None:
    """How the checkpoint stores its weights: None for plain, else what its quantization_config says."""
    declared = getattr(hf_config, "quantization_config", None)
    if not declared:
        return None
    values = declared if isinstance(declared, dict) else declared.to_dict()
    words = [values.get("quant_method", "unknown"), values.get("quant_algo"), values.get("format")]
    groups = values.get("config_groups") or {}
    words += [f"{group['weights']['type']}{group['weights']['num_bits']}" for group in groups.values()]
    words += ["in blocks"] if values.get("weight_block_size") else []
    return " ".join(dict.fromkeys(str(word) for word in words if word)) or None
