"""Runs a port's run.py as it is, and writes down what `vllm.LLM.generate` returned in it.

Usage: python -m autoport.validation.smoke_recorder RECORD RUN_PY [ARGUMENTS ...]
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec

from autoport.files import write_atomic
from autoport.validation.smoke_rules import PROBE_LOGPROBS, Generation, Recorded


def main(record: Path, script: str, arguments: list[str]) -> None:
    """Run `script` as a program; after its own generation, ask for log-probabilities of the first new token."""
    import vllm

    generate = vllm.LLM.generate

    def recorded(self: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        outputs = generate(self, prompts, *args, **options)
        result = Recorded([_generation(output) for output in outputs])
        write_atomic(record, msgspec.json.encode(result))
        try:
            params = vllm.SamplingParams(max_tokens=1, temperature=0.0, logprobs=PROBE_LOGPROBS)
            for generation, output in zip(
                result.generations, generate(self, prompts, params, use_tqdm=False), strict=True
            ):
                generation.top = {
                    int(token): value.logprob for token, value in output.outputs[0].logprobs[0].items()
                }
        except Exception as error:
            result.probe_error = f"{type(error).__name__}: {error}"
        write_atomic(record, msgspec.json.encode(result))
        return outputs

    vllm.LLM.generate = recorded
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _generation(output: Any) -> Generation:
    answer = output.outputs[0]
    return Generation(
        prompt=output.prompt or "",
        prompt_token_ids=list(output.prompt_token_ids or []),
        text=answer.text,
        token_ids=list(answer.token_ids),
        finish_reason=answer.finish_reason or "",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
