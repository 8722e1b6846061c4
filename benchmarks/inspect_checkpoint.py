"""Inspection of a checkpoint, timed: python benchmarks/inspect_checkpoint.py

First against the usual way, which opens each shard and loads its tensors to print their shapes, on a checkpoint that
fits the disk; then alone on a sparse checkpoint of 700 GB in 160 shards, and with ten times the tensors. Each
measurement is a process of its own: seconds of CPU after imports, peak memory, bytes read.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from checkpoints import llama_keys, small_config, write_checkpoint

START = "import json, resource, sys, time\n"
END = """
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu": time.process_time() - started, "wall": time.monotonic() - wall,
                  "peak": usage.ru_maxrss * 1024, "read": read, "tensors": count}))
"""
OURS = """
from autoport.research.checkpoint import read_checkpoint
from autoport.research.inspection import fold_keys
from autoport.research.layout import describe_layout
from autoport.research.source import open_source
started, wall = time.process_time(), time.monotonic()
checkpoint = read_checkpoint(open_source(sys.argv[1]))
fold_keys(checkpoint), describe_layout(checkpoint)
read, count = checkpoint.bytes_read, len(checkpoint.tensors)
"""
PLAN = """
from autoport.analysis.step import make_plan
from autoport.step import Options
from autoport.research.step import research
started, wall = time.process_time(), time.monotonic()
facts, checkpoint = research(sys.argv[1])
make_plan("big", facts, checkpoint, Options(context_length=4096, batch_size=1))
read, count = checkpoint.bytes_read, len(checkpoint.tensors)
"""
USUAL = """
import glob
from safetensors import safe_open
import torch
started, wall = time.process_time(), time.monotonic()
read = count = 0
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with safe_open(path, framework="pt") as file:
        for key in file.keys():
            tensor = file.get_tensor(key)
            shape, dtype = tuple(tensor.shape), tensor.dtype
            read += tensor.nbytes
            count += 1
"""


def measure(code: str, folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", START + code + END, str(folder)], capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def describe(name: str, result: dict[str, float]) -> str:
    return (
        f"{name:<26}{result['tensors']:>9,.0f} tensors  {result['cpu']:>8.3f} s CPU  {result['wall']:>8.3f} s  "
        f"{result['peak'] / 1e6:>7.0f} MB peak  {result['read'] / 1e6:>12,.3f} MB read"
    )


def experts_checkpoint(folder: Path, layers: int, experts: int, shards: int, total_bytes: int) -> None:
    """A sparse Qwen3-MoE checkpoint with a tensor for each expert and projection."""
    hidden, inner = 4096, max(8, total_bytes // (layers * experts * 3 * 2 * 4096) // 8 * 8)
    config = small_config(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_hidden_layers=layers,
        hidden_size=hidden,
        max_position_embeddings=4096,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=inner,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    keys = {key: entry for key, entry in llama_keys(config).items() if ".mlp." not in key}
    for layer in range(layers):
        start = f"model.layers.{layer}."
        keys |= {f"{start}self_attn.{name}_norm.weight": ("BF16", (128,)) for name in "qk"}
        keys[f"{start}mlp.gate.weight"] = ("BF16", (experts, hidden))
        for expert in range(experts):
            for name in ("gate", "up", "down"):
                shape = (hidden, inner) if name == "down" else (inner, hidden)
                keys[f"{start}mlp.experts.{expert}.{name}_proj.weight"] = ("BF16", shape)
    write_checkpoint(folder, config, keys, shards=shards)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gigabytes", type=float, default=2.0, help="size of the checkpoint that both ways read"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        small, large, many = (Path(root, name) for name in ("small", "large", "many"))
        experts_checkpoint(small, 16, 8, 8, int(arguments.gigabytes * 1e9))
        ours, usual = measure(OURS, small), measure(USUAL, small)
        print(describe("usual way", usual))
        print(describe("autoport", ours))
        for what, key in (("CPU", "cpu"), ("time", "wall"), ("peak memory", "peak"), ("bytes read", "read")):
            print(f"  {what}: {usual[key] / max(ours[key], 1e-9):,.1f} times less")
        experts_checkpoint(large, 60, 54, 160, 700_000_000_000)
        result = measure(OURS, large)
        print(describe("700 GB in 160 shards", result))
        experts_checkpoint(many, 60, 540, 160, 700_000_000_000)
        tenfold = measure(OURS, many)
        print(describe("with ten times as many", tenfold))
        per_tensor = (tenfold["cpu"] / tenfold["tensors"]) / (result["cpu"] / result["tensors"])
        print(f"  CPU per tensor with ten times as many: {per_tensor:.2f} of before (1: linear)")
        planned = measure(PLAN, many)
        print(describe("research and plan of it", planned))
        met = result["cpu"] < 1.5 and result["peak"] < 150e6 and planned["cpu"] < 5
        print("limits (1.5 s CPU and 150 MB peak at 700 GB, 5 s for the plan):", "met" if met else "MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
