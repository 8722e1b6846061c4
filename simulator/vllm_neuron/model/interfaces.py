"""Optional abilities of a model, as protocols."""

from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class SupportsVisionWarmup(Protocol):
    def build_vision_synthetic_inputs(
        self, bucket: int, vision_neuron_config: Any, device: torch.device
    ) -> dict[str, torch.Tensor]: ...


@runtime_checkable
class SupportsSpatialMerge(Protocol):
    @classmethod
    def get_vision_token_merge_factor(cls, hf_config: Any) -> int: ...


@runtime_checkable
class SupportsMaxPixels(Protocol):
    @classmethod
    def get_max_pixels_token_count(cls, hf_config: Any, max_pixels: int) -> int: ...


@runtime_checkable
class SupportsDisaggEncoder(Protocol):
    @classmethod
    def get_epd_kwargs(cls, item: Any) -> dict[str, Any]: ...


@runtime_checkable
class SupportsMRoPE(Protocol):
    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Return positions [3, S] (int64) and the offset of the positions that follow."""
        ...
