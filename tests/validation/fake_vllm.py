"""A package `vllm` for tests: `LLM` writes what the variable FAKE_LLM says, the server is the small one."""

import os
import sys
from pathlib import Path

LLM = """
import os, sys
from types import SimpleNamespace

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, model, **options):
        if os.environ.get("FAKE_LLM") == "crash":
            raise RuntimeError("Checkpoint key(s) not found for parameter 'norm': ['model.norm.weight']")

    def generate(self, prompts, params, use_tqdm=True):
        outputs = []
        for index, prompt in enumerate(prompts):
            start = 0 if os.environ.get("FAKE_LLM") == "same" else 50 * index
            tokens = [start + step for step in range(params.max_tokens)]
            tops = [{start: SimpleNamespace(logprob=-0.5 - index)}] if getattr(params, "logprobs", 0) else None
            answer = SimpleNamespace(text=f" text {start}", token_ids=tokens, finish_reason="length", logprobs=tops)
            outputs.append(SimpleNamespace(prompt=prompt, prompt_token_ids=[1], outputs=[answer]))
        return outputs
"""


def write_fake_vllm(folder: Path) -> dict[str, str]:
    """Write the package and return the environment in which Python finds it."""
    server = folder / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True, exist_ok=True)
    for package in (folder / "vllm" / "entrypoints", server):
        (package / "__init__.py").write_text("")
    (folder / "vllm" / "__init__.py").write_text(LLM)
    (server / "api_server.py").write_text("from fake_openai import main\n\nmain()\n")
    paths = [str(folder), str(Path(__file__).parent), *sys.path]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
