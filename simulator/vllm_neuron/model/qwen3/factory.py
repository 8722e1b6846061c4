"""Factory of Qwen3ForCausalLM: checks the configuration and selects the implementation."""

from typing import Any

from torch import nn
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.model.neuron_config import NeuronConfig

from .config import UnsupportedConfigError, checkpoint_format


class Qwen3ForCausalLM(nn.Module):
    """What vLLM registers for the architecture; `from_configs` returns the implementation itself."""

    def __init__(
        self,
        hf_config: Any = None,
        neuron_config: NeuronConfig | None = None,
        *,
        vllm_config: Any = None,
        prefix: str = "",
    ):
        """Store the implementation for these configs, or for the ones of `vllm_config`."""
        super().__init__()
        if vllm_config is not None:
            hf_config = vllm_config.model_config.hf_config
            neuron_config = NeuronConfig.from_dict(vllm_config.additional_config.get("neuron_config", {}))
        self._model = self._select_implementation(hf_config, neuron_config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def embed_input_ids(self, input_ids: Any) -> Any:
        """Only here because vLLM takes no class without it for a model; nothing calls it."""
        raise NotImplementedError("forward embeds the tokens")

    def compute_logits(self, hidden_states: Any) -> Any:
        """Only here because vLLM takes no class without it for a text generator; nothing calls it."""
        raise NotImplementedError("forward returns logits")

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
        quantization = neuron_config.quantization if neuron_config is not None else None

        # What the user asks for
        if quantization == "bf16":
            from .model import Qwen3ForCausalLM as Model

            return Model.from_configs(hf_config, neuron_config)

        # Fallback
        from .model import Qwen3ForCausalLM as Model

        return Model.from_configs(hf_config, neuron_config)

    @classmethod
    def _validate_config(cls, hf_config: Any, neuron_config: NeuronConfig | None) -> None:
        problems = cls._variant_problems(hf_config, neuron_config)
        checks: list[tuple[str, Any, tuple[Any, ...]]] = [
            # (setting, what the configs ask, what the implementations do)
            ("layer_types", set(getattr(hf_config, "layer_types", None) or ()), (set(), {"full_attention"})),
            ("hidden_act", getattr(hf_config, "hidden_act", None), ("silu", "swish")),
            ("attention_bias", getattr(hf_config, "attention_bias", None), (None, False)),
            ("mlp_bias", getattr(hf_config, "mlp_bias", None), (None, False)),
            ("rope_type", hf_config.rope_parameters["rope_type"], ("default",)),
            ("tie_word_embeddings", hf_config.tie_word_embeddings, (False,)),
            (
                "sliding_window with layer_types:",
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
        problems += [
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
        heads = hf_config.num_attention_heads
        if heads % tp_size == 0 and heads // tp_size % 2:
            problems.append(
                f"tensor_parallel_size {tp_size} (possible: an even number of the {heads} heads on each rank)"
            )
        kv_heads = hf_config.num_key_value_heads
        if kv_heads % tp_size and tp_size % kv_heads:
            problems.append(
                f"tensor_parallel_size {tp_size} (possible: divisors and multiples of {kv_heads} KV heads)"
            )

        if problems:
            raise UnsupportedConfigError(f"{cls.__name__} does not support " + "; ".join(problems))

    @classmethod
    def _variant_problems(cls, hf_config: Any, neuron_config: NeuronConfig | None) -> list[str]:
        """What the configs ask that no implementation does, or not on this platform."""
        quantization = neuron_config.quantization if neuron_config is not None else None
        checkpoint = checkpoint_format(hf_config)

        quantizations = ["bf16"]
        # Format of a quantized checkpoint -> the values of `quantization` that load it.
        formats: dict[str, tuple[str, ...]] = {}
        problems = []
        if quantization is not None and quantization not in quantizations:
            problems.append(
                f"quantization {quantization!r} (possible: {', '.join(map(repr, quantizations))})"
            )
        if checkpoint is not None and checkpoint not in formats:
            problems.append(
                f"a checkpoint with quantization_config {checkpoint!r} "
                f"(possible: {', '.join(['unquantized', *map(repr, formats)])})"
            )
        elif checkpoint is not None and quantization not in (None, *formats[checkpoint]):
            problems.append(
                f"quantization {quantization!r} for a checkpoint with quantization_config {checkpoint!r} "
                f"(possible: {', '.join(map(repr, formats[checkpoint]))})"
            )
        return problems
