from dataclasses import dataclass, fields

import torch


@dataclass
class NovaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict
    tie_word_embeddings: bool
    torch_dtype: torch.dtype
    pad_token_id: int = 0
    neuron_config: object = None

    @classmethod
    def from_configs(cls, hf_config, neuron_config=None):
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in hf_config.to_dict().items() if key in known}
        return cls(**values, neuron_config=neuron_config)
