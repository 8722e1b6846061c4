import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm_neuron.functional
from libtorch_neuronx_lite.compile.platform import get_platform_target
from vllm_neuron.utils import bucket_utils, dtype_utils, neuron_utils


@pytest.mark.parametrize(
    ("override", "target", "clamp"),
    [(None, "trn2", 240.0), (" TRN3 ", "trn3", 448.0), ("trn3pre", "trn3pre", 448.0)],
)
def test_platform_decides_the_fp8_range(monkeypatch, override, target, clamp):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    if override:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", override)
    assert get_platform_target() == target
    assert dtype_utils._fp8_clamp_max() == clamp


def test_kv_cache_dtype():
    config = SimpleNamespace(dtype=torch.float16)
    assert dtype_utils.kv_cache_dtype_str_to_dtype("auto", config) == torch.float16
    for name in dtype_utils.QUANTIZED_KV_CACHE_DTYPES:
        assert dtype_utils.kv_cache_dtype_str_to_dtype(name, config) == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="fp8_e5m2"):
        dtype_utils.kv_cache_dtype_str_to_dtype("fp8_e5m2", config)


def test_fp8_segments_must_be_packed():
    dtype_utils.validate_fp8_segmented_supported(True, True)
    dtype_utils.validate_fp8_segmented_supported(False, False)
    with pytest.raises(NotImplementedError):
        dtype_utils.validate_fp8_segmented_supported(True, False)


@pytest.mark.parametrize(
    ("environment", "device", "expected"),
    [
        ({}, "", True),
        ({}, "cpu", False),
        ({}, "meta", True),
        ({"VLLM_NEURON_CPU_MODE": "1"}, "neuron:0", False),
        ({"VLLM_NEURON_CPU_MODE": "1", "NKI_SIMULATOR": "1"}, "cpu", True),
        ({"VLLM_NEURON_DISABLE_NKI_KERNELS": "1"}, "neuron:0", False),
    ],
)
def test_can_run_kernel(monkeypatch, environment, device, expected):
    for name in ("VLLM_NEURON_CPU_MODE", "NKI_SIMULATOR", "VLLM_NEURON_DISABLE_NKI_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert neuron_utils.can_run_kernel(device) is expected


def test_values_are_readable():
    assert neuron_utils.values_are_readable(torch.ones(1))
    assert not neuron_utils.values_are_readable(torch.ones(1, device="meta"))
    seen = []

    def traced(x):
        seen.append(neuron_utils.values_are_readable(x))
        return x + 1

    torch.compile(traced, fullgraph=True, backend="eager")(torch.ones(1))
    assert seen == [False]


def test_forward_context_forbids_new_shapes_unless_eager(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    compiled(torch.ones(2))

    def config(eager):
        return SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager))

    with neuron_utils.model_forward_context(config(False)), pytest.raises(RuntimeError, match="recompile"):
        compiled(torch.ones(3))
    with neuron_utils.model_forward_context(config(True)):
        compiled(torch.ones(3))


def test_operators_do_not_import_vllm():
    """Importing the operators must stay cheap and possible without an engine."""
    files = list(Path(vllm_neuron.functional.__file__).parent.rglob("*.py"))
    assert files
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "vllm" for name in names), file


def test_default_buckets():
    assert bucket_utils.resolve_num_batched_tokens_buckets(1000) == [128, 256, 512, 1000]
    assert bucket_utils.resolve_num_batched_tokens_buckets(100) == [100]
    assert bucket_utils.resolve_num_seqs_buckets(6) == [1, 2, 4, 6]
    assert bucket_utils.resolve_decode_context_length_buckets(1024) == [1024]


@pytest.mark.parametrize("buckets", [[], [256, 128, 1024], [128, 128, 1024], [0, 1024], [128, 512]])
def test_bad_prefill_buckets(buckets):
    with pytest.raises(ValueError, match="num_batched_tokens_buckets"):
        bucket_utils.resolve_num_batched_tokens_buckets(1024, buckets)
    assert bucket_utils.resolve_num_batched_tokens_buckets(1024, [128, 1024]) == [128, 1024]


@pytest.mark.parametrize("buckets", [[], [130], [1024], [512, 256]])
def test_bad_context_buckets(buckets):
    with pytest.raises(ValueError, match="decode_context_length_buckets"):
        bucket_utils.resolve_decode_context_length_buckets(1024, buckets)
    assert bucket_utils.resolve_decode_context_length_buckets(1024, [256, 512]) == [256, 512, 1024]


def test_segmented_prefill():
    resolve = bucket_utils.resolve_segmented_prefill_config
    assert resolve(4096, 4096) == (None, None)
    assert resolve(512, 4096) == ([512], [512])
    with pytest.raises(ValueError, match="must be a segment size"):
        resolve(768, 4096)
    with pytest.raises(ValueError, match="limited to max_model_len 16384"):
        resolve(32768, 32768)


def test_segment_sizes_from_the_user():
    resolve = bucket_utils.resolve_kv_segment_size_buckets
    assert resolve([512], [512]) == [512]
    for sizes, tokens in (([512, 1024], None), ([256], None), ([512], [128, 512])):
        with pytest.raises(ValueError, match="kv_segment_size_buckets"):
            resolve(sizes, tokens)


def test_bucket_for_count():
    buckets = [128, 256]
    assert [bucket_utils.get_bucket_for_count(n, buckets) for n in (0, 128, 129)] == [128, 128, 256]
    with pytest.warns(UserWarning, match="257 exceeds"):
        assert bucket_utils.get_bucket_for_count(257, buckets) == 256
    assert bucket_utils.get_decode_padded_batch_size(3, 1, [1, 2, 4]) == 4
    assert bucket_utils.get_decode_padded_batch_size(3, 2, [1, 2, 4]) == 3
    assert bucket_utils.get_decode_padded_batch_size(3, 2, [1, 2, 4], decode_token_threshold=2) == 4
    assert bucket_utils.get_max_num_batched_tokens(512, 4096) == 512
