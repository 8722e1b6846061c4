"""Configuration of the plugin, ``additional_config["neuron_config"]`` of the engine."""

from dataclasses import dataclass, field, fields
from typing import Any

_PARALLEL_SIZES = ("ep_degree", "attention_dp_size", "embedding_dp_size", "lm_head_dp_size", "mlp_dp_size")


class OnDeviceSamplingConfig:
    """Sampling on the device.

    Args (keywords; unknown ones are ignored):
        all_greedy: Arg-max only; accepts the strings "true", "1" and "yes". Default False.
        max_top_k: Best tokens considered, default 256.
        deterministic: Take 0.5 for the random number, default False.
        sampling_dp_degree: Ranks that share the sampling of a batch, default 1.
        capture_topk: Keep the top-k values, default False.
    """

    def __init__(self, **kwargs: Any):
        all_greedy = kwargs.get("all_greedy", False)
        if isinstance(all_greedy, str):
            all_greedy = all_greedy.lower() in ("true", "1", "yes")
        self.all_greedy: bool = all_greedy
        self.max_top_k: int = kwargs.get("max_top_k", 256)
        self.deterministic: bool = kwargs.get("deterministic", False)
        self.sampling_dp_degree: int = kwargs.get("sampling_dp_degree", 1)
        self.capture_topk: bool = kwargs.get("capture_topk", False)


@dataclass
class NeuronConfig:
    """Fields of the plugin's configuration.

    Attributes:
        on_device_sampling_config: None turns on-device sampling off; it is on by default.
        max_logprobs: Log-probabilities per token that the engine may ask for; 0 is none, -1 is all logits.

    Raises:
        ValueError: A parallel size is not an integer of at least 1, or enable_structured_outputs not a bool.
    """

    ep_degree: int = 1
    attention_dp_size: int = 1
    embedding_dp_size: int = 1
    lm_head_dp_size: int = 1
    mlp_dp_size: int = 1
    on_device_sampling_config: OnDeviceSamplingConfig | None = field(default_factory=OnDeviceSamplingConfig)
    max_logprobs: int = 0
    tensor_capture: Any = None
    tensor_replacement: Any = None
    kv_segment_size_buckets: list[int] | None = None
    debug_logits_dir: str | None = None
    quantization: str | None = None
    all2all_backend: str | None = None
    modules_to_not_convert: list[str] | None = None
    num_batched_tokens_buckets: list[int] | None = None
    num_seqs_buckets: list[int] | None = None
    decode_context_length_buckets: list[int] | None = None
    enable_structured_outputs: bool = False
    fp8_packed_kv: bool = False

    def __post_init__(self) -> None:
        for name in _PARALLEL_SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(self.enable_structured_outputs, bool):
            raise ValueError(
                f"enable_structured_outputs must be a bool, got {self.enable_structured_outputs!r}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "NeuronConfig":
        """Build from ``additional_config["neuron_config"]``; unknown keys are ignored.

        ``on_device_sampling_config`` absent is on with its defaults, None is off, a dict gives its options.
        """
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        sampling = values.get("on_device_sampling_config")
        if isinstance(sampling, dict):
            values["on_device_sampling_config"] = OnDeviceSamplingConfig(**sampling)
        return cls(**values)
