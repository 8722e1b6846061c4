"""Loading of checkpoints: keys, dtypes, and what a rank holds."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.utils.weight_loader import set_weight_loader, sharding_weight_loader

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 4, device="meta"))
        set_weight_loader(self.weight, sharding_weight_loader(0, 2, 2))
        self.fused = nn.Parameter(torch.empty(4, device="meta"))
        loader = sharding_weight_loader(0, 4, 1)
        loader.transform = lambda slices, rank: torch.cat([s[:] for s in slices])
        set_weight_loader(self.fused, loader)
        self.register_buffer("buffer", torch.empty(3, device="meta"))


TENSORS = {
    "a.weight": torch.arange(16.0).reshape(4, 4),
    "b.low": torch.tensor([1.0, 2.0]),
    "b.high": torch.tensor([3.0, 4.0]),
    "other": torch.ones(1),
}
MAPPINGS = {"weight": "a.weight", "fused": ["b.high", "b.low"]}


@pytest.fixture
def folder(tmp_path):
    names = sorted(TENSORS)
    save_file({n: TENSORS[n] for n in names[:2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({n: TENSORS[n] for n in names[2:]}, tmp_path / "model-00002-of-00002.safetensors")
    return str(tmp_path)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_shards_mapped_keys_and_unexpected_keys(folder):
    result = SafetensorsCheckpoint(folder).load_sharded(1, 2, Model(), MAPPINGS, CPU)
    assert torch.equal(result.state_dict["weight"], TENSORS["a.weight"][2:])
    assert result.state_dict["fused"].tolist() == [3, 4, 1, 2]  # in the order of the list
    assert set(result.state_dict) == {"weight", "fused"}  # buffers are not loaded
    assert result.missing_keys == []
    assert result.unexpected_keys == ["other"]


def test_names_and_files(folder):
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.get_num_files() == 2
    assert checkpoint.get_tensor_names() == set(TENSORS)


def test_a_missing_key_names_the_parameter_and_the_keys(folder, process_group):
    mappings = {**MAPPINGS, "fused": ["b.high", "b.none"]}
    for load in ("load_sharded", "load_sharded_pipelined"):
        with pytest.raises(RuntimeError) as caught:
            getattr(SafetensorsCheckpoint(folder), load)(0, 2, Model(), mappings, CPU)
        assert str(caught.value) == (
            "Checkpoint key(s) not found for parameter 'fused': ['b.none']. "
            "Use strict=False to skip missing keys."
        )
    result = SafetensorsCheckpoint(folder).load_sharded(0, 2, Model(), mappings, CPU, strict=False)
    assert result.missing_keys == ["fused"]
    assert set(result.state_dict) == {"weight"}


def test_only_the_pipelined_load_casts(folder, process_group, caplog):
    model = Model().to(torch.bfloat16)
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.load_sharded(0, 2, model, MAPPINGS, CPU).state_dict["weight"].dtype == torch.float32
    assert not caplog.records
    overrides = {"fused": torch.float32}
    with caplog.at_level(logging.WARNING):
        state = checkpoint.load_sharded_pipelined(0, 2, model, MAPPINGS, CPU, overrides).state_dict
    assert state["weight"].dtype == torch.bfloat16
    assert state["fused"].dtype == torch.float32
    assert [r.getMessage() for r in caplog.records] == ["Casting weight from torch.float32 to torch.bfloat16"]


def test_the_pipelined_load_needs_a_process_group(folder):
    with pytest.raises(ValueError, match="process group has not been initialized"):
        SafetensorsCheckpoint(folder).load_sharded_pipelined(0, 2, Model(), MAPPINGS, CPU)


def test_loaded_tensors_do_not_hang_on_the_file(folder, tmp_path):
    state = SafetensorsCheckpoint(folder).load_sharded(0, 2, Model(), MAPPINGS, CPU).state_dict
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)  # in place: a mapped tensor would change
    assert torch.equal(state["weight"], TENSORS["a.weight"][:2])
    assert state["weight"].untyped_storage().nbytes() == state["weight"].nbytes


def test_no_safetensors_file(tmp_path):
    with pytest.raises(AssertionError, match=r"no \.safetensors file"):
        SafetensorsCheckpoint(str(tmp_path))


def test_loading_takes_little_more_memory_than_the_shard(tmp_path):
    """A rank of two reads half of every tensor, and pages of the mapped file do not pile up."""
    mebibyte, count = 2**20, 16
    tensors = {f"w.{index}": torch.ones(16, mebibyte // 4) for index in range(count)}  # 16 MiB each
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    model = nn.Module()
    model.w = nn.ParameterList(
        nn.Parameter(torch.empty(8, mebibyte // 4, device="meta")) for _ in range(count)
    )
    for parameter in model.w:
        set_weight_loader(parameter, sharding_weight_loader(0, 8, 2))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = SafetensorsCheckpoint(str(tmp_path)).load_sharded(1, 2, model, {}, CPU)
    shard = sum(tensor.untyped_storage().nbytes() for tensor in result.state_dict.values())
    assert shard == count * 8 * mebibyte
    assert resident("VmHWM") - before < 1.3 * shard


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
