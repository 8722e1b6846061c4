"""Loading of safetensors checkpoints, one rank's shards at a time."""

import logging
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open

from vllm_neuron.utils.weight_loader import Slice, get_weight_loader

logger = logging.getLogger(__name__)

# Bytes of tensors after which the files are mapped anew: pages that were read stay in memory until then.
MAPPED_LIMIT = 16 * 2**20


class CheckpointLoadResult(NamedTuple):
    """What was loaded.

    Attributes:
        state_dict: Parameter name -> this rank's tensor.
        missing_keys: Parameters whose checkpoint keys are not there (with ``strict=False``).
        unexpected_keys: Checkpoint keys that no parameter takes, sorted.
    """

    state_dict: dict[str, torch.Tensor]
    missing_keys: list[str]
    unexpected_keys: list[str]


class SafetensorsCheckpoint:
    """The ``*.safetensors`` files of a folder or of a model on the hub.

    Files are memory mapped and tensors read slice by slice; the index file is not used.

    Args:
        model_name_or_path: Local folder, or a hub id.
        cache_dir: Download folder for a hub id.

    Raises:
        AssertionError: There is no safetensors file.
    """

    def __init__(self, model_name_or_path: str, cache_dir: str | None = None):
        self._source = model_name_or_path
        self._cache_dir = cache_dir
        self._is_local = os.path.isdir(model_name_or_path)
        self._names = self._list_files()
        assert self._names, f"no .safetensors file in {model_name_or_path}"
        self._files: dict[str, str] = {}  # tensor -> file
        self._mapped: dict[str, Any] = {}  # file -> what is open

    def get_num_files(self) -> int:
        return len(self._names)

    def get_tensor_names(self) -> set[str]:
        self._ensure_indexed()
        return set(self._files)

    def load_sharded(
        self,
        rank: int,
        world_size: int,
        model: torch.nn.Module,
        mappings: dict[str, str | list[str]],
        device: torch.device,
        strict: bool = True,
    ) -> CheckpointLoadResult:
        """Load every parameter's shard, in the dtype that its weight loader returns.

        Args:
            rank: Rank that the weight loaders get.
            mappings: Parameter name -> checkpoint key, or the list of keys whose slices the weight loader
                takes in this order. A parameter that is not listed is loaded from its own name.

        Raises:
            RuntimeError: A checkpoint key is missing and `strict` is set.
        """
        del world_size
        state_dict: dict[str, torch.Tensor] = {}
        missing: list[str] = []
        for name, _, tensor in self._load(rank, model, mappings, strict):
            if tensor is None:
                missing.append(name)
            else:
                state_dict[name] = tensor.to(device)
        return CheckpointLoadResult(state_dict, missing, self._unexpected(model, mappings))

    def load_sharded_pipelined(
        self,
        rank: int,
        world_size: int,
        model: torch.nn.Module,
        mappings: dict[str, str | list[str]],
        device: torch.device,
        dtype_override: dict[str, torch.dtype] | None = None,
        strict: bool = True,
    ) -> CheckpointLoadResult:
        """Like `load_sharded`, and cast to ``dtype_override[name]`` or else to the parameter's dtype.

        A cast is logged as a warning. On the device all ranks call it together and read the files in turn;
        here each reads its own slices.

        Raises:
            RuntimeError: A checkpoint key is missing and `strict` is set.
            ValueError: torch.distributed is not initialised.
        """
        del world_size
        if not dist.is_initialized():
            raise ValueError("Default process group has not been initialized, call init_process_group first.")
        state_dict: dict[str, torch.Tensor] = {}
        missing: list[str] = []
        for name, param, tensor in self._load(rank, model, mappings, strict):
            if tensor is None:
                missing.append(name)
                continue
            dtype = (dtype_override or {}).get(name, param.dtype)
            if tensor.dtype != dtype:
                logger.warning("Casting %s from %s to %s", name, tensor.dtype, dtype)
            state_dict[name] = tensor.to(device=device, dtype=dtype)
        return CheckpointLoadResult(state_dict, missing, self._unexpected(model, mappings))

    def _load(
        self, rank: int, model: torch.nn.Module, mappings: dict[str, str | list[str]], strict: bool
    ) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor | None]]:
        self._ensure_indexed()
        read = 0
        for name, param in model.named_parameters():
            keys = _keys(name, mappings)
            absent = [key for key in keys if key not in self._files]
            if absent and strict:
                raise RuntimeError(
                    f"Checkpoint key(s) not found for parameter '{name}': {absent}. "
                    "Use strict=False to skip missing keys."
                )
            if absent:
                yield name, param, None
                continue
            slices = [self._get_slice(key) for key in keys]
            tensor = get_weight_loader(param).load(slices, rank)
            # A tensor that still lies in the mapped file would keep all of it mapped.
            yield name, param, tensor if tensor.untyped_storage().resizable() else tensor.clone()
            read += sum(math.prod(part.get_shape()) * tensor.element_size() for part in slices)
            if read > MAPPED_LIMIT:
                read = 0
                del slices, tensor
                self._mapped.clear()

    def _unexpected(self, model: torch.nn.Module, mappings: dict[str, str | list[str]]) -> list[str]:
        used = {key for name, _ in model.named_parameters() for key in _keys(name, mappings)}
        return sorted(set(self._files) - used)

    def _get_slice(self, name: str) -> Slice:
        self._ensure_indexed()
        filename = self._files[name]
        if filename not in self._mapped:
            self._mapped[filename] = safe_open(filename, framework="pt")
        return self._mapped[filename].get_slice(name)

    def _ensure_indexed(self) -> None:
        if self._files:
            return
        for filename in self._names:
            path = self._fetch(filename)
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    def _list_files(self) -> list[str]:
        if self._is_local:
            names = os.listdir(self._source)
        else:
            from huggingface_hub import list_repo_files

            names = [name for name in list_repo_files(self._source) if "/" not in name]
        return sorted(name for name in names if name.endswith(".safetensors"))

    def _fetch(self, filename: str) -> str:
        if self._is_local:
            return os.path.join(self._source, filename)
        from huggingface_hub import hf_hub_download

        return hf_hub_download(self._source, filename, cache_dir=self._cache_dir)


def _keys(name: str, mappings: dict[str, str | list[str]]) -> list[str]:
    keys = mappings.get(name, name)
    return keys if isinstance(keys, list) else [keys]
