"""Factory of SmolLM3ForCausalLM: checks the configuration and selects the implementation."""

from typing import Any

from torch import nn
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.model.neuron_config import NeuronConfig

from .config import UnsupportedConfigError


class SmolLM3ForCausalLM(nn.Module):
    """What vLLM registers for the architecture; `from_configs` returns the implementation itself."""

    def __init__(self, hf_config: Any, neuron_config: NeuronConfig | None = None):
        super().__init__()
        self._model = self._select_implementation(hf_config, neuron_config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: NeuronConfig | None = None) -> nn.Module:
        """Return the implementation for these configs.

        Raises:
            UnsupportedConfigError: No implementation does what the configs ask; lists every reason.
        """
        return cls._select_implementation(hf_config, neuron_config)

    @classmethod
    def _select_implementation(cls, hf_config: Any, neuron_config: NeuronConfig | None) -> nn.Module:
        cls._validate_config(hf_config, neuron_config)

        # One implementation so far (bf16); a further one is a branch here with its own import.
        from .model import SmolLM3ForCausalLM as Model

        return Model.from_configs(hf_config, neuron_config)

    @classmethod
    def _validate_config(cls, hf_config: Any, neuron_config: NeuronConfig | None) -> None:
        quantization = neuron_config.quantization if neuron_config is not None else None
        checks: list[tuple[str, Any, tuple[Any, ...]]] = [
            # (setting, what the configs ask, what the implementation does)
            ("quantization", quantization, (None, "bf16")),
            ("quantization_config", getattr(hf_config, "quantization_config", None), (None,)),
            ("hidden_act", getattr(hf_config, "hidden_act", None), ("silu", "swish")),
            ("attention_bias", getattr(hf_config, "attention_bias", None), (None, False)),
            ("mlp_bias", getattr(hf_config, "mlp_bias", None), (None, False)),
            ("rope_type", hf_config.rope_parameters["rope_type"], ("default",)),
            ("tie_word_embeddings", hf_config.tie_word_embeddings, (True,)),
            (
                "[w for w in [sliding_window if kind == 'sliding_attention' else None for kind in layer_types] if w]",
                [
                    w
                    for w in [
                        hf_config.sliding_window if kind == "sliding_attention" else None
                        for kind in hf_config.layer_types
                    ]
                    if w
                ],
                ([],),
            ),
        ]
        if neuron_config is not None:
            degrees = (
                "ep_degree",
                "attention_dp_size",
                "embedding_dp_size",
                "lm_head_dp_size",
                "mlp_dp_size",
            )
            checks += [(degree, getattr(neuron_config, degree), (1,)) for degree in degrees]
        problems = [
            f"{setting} {asked!r} (possible: {', '.join(map(repr, possible))})"
            for setting, asked, possible in checks
            if asked not in possible
        ]

        tp_size = get_tp_group().world_size
        sizes = {
            "num_attention_heads": hf_config.num_attention_heads,
            "intermediate_size": hf_config.intermediate_size,
            "vocab_size": hf_config.vocab_size,
        }
        for field, size in sizes.items():
            if size % tp_size:
                problems.append(f"tensor_parallel_size {tp_size} (possible: divisors of {field} {size})")
        kv_heads = hf_config.num_key_value_heads
        if kv_heads % tp_size and tp_size % kv_heads:
            problems.append(
                f"tensor_parallel_size {tp_size} (possible: divisors and multiples of {kv_heads} KV heads)"
            )

        if problems:
            raise UnsupportedConfigError(f"{cls.__name__} does not support " + "; ".join(problems))
