"""Damaged and hostile modeling files of a checkpoint, read as research reads them."""

import ast
import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from autoport.analysis.step import make_plan
from autoport.errors import Refusal
from autoport.research.config_defaults import transformers_dir
from autoport.research.step import research
from autoport.step import Options
from checkpoints import llama_keys, small_config, write_checkpoint
from fuzzing import check

# Model type -> what the names of its classes begin with.
MODELS = {
    "llama": "Llama", "gemma2": "Gemma2", "mixtral": "Mixtral", "deepseek_v3": "DeepseekV3", "phi3": "Phi3",
    "gpt_neox": "GPTNeoX", "falcon": "Falcon", "cohere": "Cohere", "gpt_oss": "GptOss", "olmo2": "Olmo2",
    "glm4": "Glm4", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
SMALL = """
import torch
from torch import nn
from torch.nn import *

class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(dtype)

def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)

class Router(nn.Module):
    def forward(self, x):
        return torch.topk(self.gate(x).softmax(-1, dtype=torch.float32), self.top_k)

class Attention(nn.Module):
    def __init__(self, config):
        self.q_norm = Norm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.LayerNorm(config.head_dim, bias=config.bias)
        self.scaling = config.head_dim**-0.5
        self.sinks = nn.Parameter(torch.empty(4))

    def forward(self, x, cos, sin):
        q, k = self.q_norm(self.q(x)), self.k_norm(self.k(x))
        return self.o(torch.tanh(q * cos + rotate_half(q) * sin) * self.scaling)

class MLP(nn.Module):
    def __init__(self, config):
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))

class FuzzDecoderLayer(nn.Module):
    def __init__(self, config):
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.router = Router(config)
        self.input_norm = Norm(config.hidden_size, config.rms_norm_eps)
        if config.num_hidden_layers == 2:
            self.post_norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, mask=None):
        residual = hidden_states
        hidden_states = self.self_attn(self.input_norm(hidden_states))
        if mask is not None and self.training:
            hidden_states = hidden_states * mask
        else:
            hidden_states = residual + hidden_states * config.residual_multiplier
        return hidden_states + self.mlp(self.post_norm(hidden_states)) * config.residual_multiplier

class FuzzForCausalLM(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([FuzzDecoderLayer(config) for _ in range(config.num_hidden_layers)])
"""
SNIPPETS = [
    "class Norm(Norm): pass", "class FuzzDecoderLayer(MLP, Attention): pass", "from x import *", "x = x",
    "return", "pass", "forward = forward", "def forward(): return 1", "def forward(self): return self",
    "def forward(*args, **kwargs): return args", "def __init__(self, *, config): self.scale = config.x",
    "if x:", "else:", "for x in x:", "with x as (y, z):", "try:", "except* E:", "match x:", "    case [a, *b]:",
    "del x", "x: int", "self.scale = getattr(config, 'x')", "getattr()", "getattr(config)", "ACT2FN[()]",
    "self.sinks = nn.Parameter()", "torch.cat()", "torch.cat(*x)", "nn.LayerNorm()", "nn.RMSNorm(*x, **y)",
    "F.layer_norm()", "F.layer_norm(*x)", "async def forward(self, x): pass", "lambda: (yield)", "@x",
    "# -*- coding: utf-16 -*-", "# coding: nonsense", "\\", '"""', "'''", "\t", "\x0c", "\x00", "\ufeff", "é = 1",
]  # fmt: skip
TOKENS = [
    "(", ")", "[", "]", "{", "}", ":", ",", "=", ":=", "*", "**", "->", "@", ".", "...", "self", "config", "None",
    "1" * 5000, "0x" + "f" * 5000, "1e999", "1j", "''", "b''", "f'{x!r:{y}}'", "not", "in", "await", "lambda", "x",
    "self.weight", "config.x.y", "F.layer_norm", "torch.topk", "norm", "\n", "\n    ", ";", "#", "if", "else", "or",
]  # fmt: skip


def code_case(folder: Path, rng: random.Random) -> None:
    """Damage a modeling file, research and plan its checkpoint: a `Refusal` or a plan, nothing else."""
    name = rng.choice([*[""] * len(MODELS), *MODELS])
    damage = rng.choice((damaged_lines, damaged_tokens, damaged_tree, damaged_bytes))
    data = damage(text_of(name), rng)
    read_code(folder, data, f"{MODELS.get(name, 'Fuzz')}ForCausalLM", rng.random() < 0.5)


def read_code(folder: Path, data: bytes, entry: str = "FuzzForCausalLM", incomplete: bool = True) -> None:
    """Research a checkpoint that brings `data` as its modeling file, and plan it."""
    config = small_config(
        architectures=["FuzzForCausalLM"],
        model_type="fuzz",
        auto_map={"AutoModelForCausalLM": f"modeling_fuzz.{entry}"},
        residual_multiplier=0.5,
    )
    if not folder.exists() or not (folder / "config.json").is_file():
        write_checkpoint(folder, config, llama_keys(config))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_fuzz.py").write_bytes(data)
    try:
        facts, checkpoint = research(str(folder))
        msgspec.json.encode(facts)
        msgspec.json.encode(make_plan("model", facts, checkpoint, Options(incomplete=incomplete)))
    except Refusal as refusal:
        check(refusal)


@functools.cache
def text_of(name: str) -> str:
    """The modeling file of a model type of transformers, or the small one."""
    root = transformers_dir()
    assert root is not None
    return (root / "models" / name / f"modeling_{name}.py").read_text() if name else SMALL


def damaged_lines(text: str, rng: random.Random) -> bytes:
    lines = text.split("\n")
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(lines))
        piece = lines[start : start + rng.choice([1, 1, 1, 5, 40])]
        match rng.randrange(5):
            case 0:
                del lines[start : start + len(piece)]
            case 1:
                lines[start:start] = piece
            case 2:
                other = rng.randrange(len(lines))
                lines[start], lines[other] = lines[other], lines[start]
            case 3:
                indent = re.match(r" *", lines[start])
                lines.insert(start, (indent[0] if indent else "") + rng.choice(SNIPPETS))
            case 4:
                lines[rng.randrange(len(lines)) :] = []
        lines = lines or [""]
    return "\n".join(lines).encode()


def damaged_tokens(text: str, rng: random.Random) -> bytes:
    tokens = re.findall(r"\w+|\s+|[^\w\s]", text)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(tokens))
        match rng.randrange(4):
            case 0:
                tokens[place] = rng.choice(TOKENS)
            case 1:
                tokens[place] = rng.choice(tokens)
            case 2:
                tokens[place] = ""
            case 3:
                other = rng.randrange(len(tokens))
                tokens[place], tokens[other] = tokens[other], tokens[place]
    return "".join(tokens).encode()


def damaged_bytes(text: str, rng: random.Random) -> bytes:
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                data[place:place] = rng.choice([b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\x0c", b"\x1a"])
            case 2:
                del data[rng.randrange(len(data)) :]
                data += b" "
    return rng.choice([b"", b"", b"\xef\xbb\xbf", b"# coding: utf-7\n", b"\xff\xfe"]) + bytes(data)


def damaged_tree(text: str, rng: random.Random) -> bytes:
    """Another program: parts of the syntax tree removed, doubled, or put where others of their kind are."""
    tree = ast.parse(text)
    places: list[tuple[ast.AST, str, Any]] = [
        (node, field, value) for node in ast.walk(tree) for field, value in ast.iter_fields(node)
    ]
    lists = [value for _, _, value in places if isinstance(value, list) and value]
    parts = [place for place in places if isinstance(place[2], ast.expr)]
    names = [place for place in places if isinstance(place[2], str)]
    for _ in range(rng.randint(1, 6)):
        items: list[Any] = rng.choice(lists)
        node, field, _ = rng.choice(parts)
        match rng.randrange(6):
            case 0:
                items[:] = rng.sample(items, rng.randrange(len(items) + 1))
            case 1:
                items += items[: rng.randint(1, 3)]
            case 2:
                same = [other for other in lists if other and items and type(other[0]) is type(items[0])]
                items[:] = list(rng.choice(same)) if same else items
            case 3 | 4:
                setattr(node, field, rng.choice(parts)[2] if rng.random() < 0.7 else ast.Constant(None))
            case 5:
                owner, attribute, _ = rng.choice(names)
                setattr(owner, attribute, rng.choice(names)[2])
    try:
        return ast.unparse(tree).encode()
    except (ValueError, AttributeError, TypeError, RecursionError, IndexError):
        return b""  # no program


def bomb(rng: random.Random) -> bytes:
    """A file whose reading could take far longer, or more memory, than its size."""
    return BOMBS[rng.choice(list(BOMBS))](rng.choice([10, 30, 90, 1000, 20_000])).encode()


def bomb_case(folder: Path, rng: random.Random) -> None:
    """Read a hostile modeling file: a `Refusal` or a plan, nothing else."""
    read_code(folder, bomb(rng))


def _layer(body: str, init: str = "") -> str:
    """The small file with another `forward` of its layer, and more in `__init__`."""
    indented = "\n".join(f"        {line}" for line in body.split("\n"))
    start, _, rest = SMALL.partition("        residual = hidden_states\n")
    text = f"{start}{indented}\n\nclass Rest" + rest[rest.index("ForCausalLM") :]
    if init:
        made = "\n".join(f"        {line}" for line in init.split("\n"))
        text = text.replace("        self.router = Router(config)", made)
    return text.replace("class RestForCausalLM", "class FuzzForCausalLM")


def _nested_ifs(count: int, test: str) -> str:
    depth = min(count, 90)
    return "\n".join(
        [*(" " * i + f"if {test}:" for i in range(depth)), " " * depth + "return unknown(x)", "return x"]
    )


BOMBS: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: SMALL + "x = " + "(" * n + ")" * n,
    "lists": lambda n: SMALL + "x = " + "[" * n + "]" * n,
    "calls": lambda n: _layer("return " + "self.mlp(" * n + "hidden_states" + ")" * n),
    "attributes": lambda n: _layer("return hidden_states" + ".x" * n),
    "subscripts": lambda n: _layer("return hidden_states" + "[0]" * n),
    "sum": lambda n: _layer("return hidden_states" + " + self.mlp(hidden_states)" * n),
    "negations": lambda n: _layer("return " + "-" * n + "hidden_states"),
    "nots": lambda n: _layer("if " + "not " * n + "x: pass\nreturn hidden_states"),
    "lambdas": lambda n: SMALL + "x = " + "lambda: " * n + "0",
    "else ifs": lambda n: _layer("if a: x = 1\n" + "elif b: x = 2\n" * n + "return hidden_states"),
    "power": lambda n: _layer("return hidden_states" + " ** 9" * n),
    "long name": lambda n: _layer("return hidden_states." + "x" * (n * 40)),
    "long number": lambda n: _layer("return hidden_states * " + "9" * n),
    "long hexadecimal number": lambda n: _layer("return hidden_states * 0x" + "f" * n),
    "long text": lambda n: SMALL + "x = '" + "\\x41" * (n * 20) + "'",
    "known ifs": lambda n: _layer(_nested_ifs(n, "config.rms_norm_eps == 1e-05")),
    "unknown ifs": lambda n: _layer(_nested_ifs(n, "unknown(x)")),
    "ifs of init": lambda n: _layer("return hidden_states", _nested_ifs(n, "config.unknown == 1")),
    "doubled sum": lambda n: _layer("\n".join(["x = hidden_states", *["x = x + x"] * n, "return x"])),
    "scaled sum": lambda n: _layer("\n".join(["x = hidden_states", *["x = (x + x) * 2"] * n, "return x"])),
    "norms of sums": lambda n: _layer(
        "\n".join(["x = hidden_states", *["x = self.input_norm(x + x)"] * n, "return x"])
    ),
    "same sums": lambda n: _layer(
        "x = hidden_states\nif a(x):\n"
        + "\n".join(["    x = self.input_norm(x + x) * 2"] * n)
        + "\nelse:\n"
        + "\n".join(["    x = self.input_norm(x + x) * 2"] * n)
        + "\nreturn x"
    ),
    "own base": lambda n: SMALL.replace("class Norm(nn.Module)", "class Norm(Norm)").replace("forward", "call"),
    "circle of bases": lambda n: (
        SMALL.replace("(nn.Module)", "(B0)") + "\n".join(f"class B{i}(B{(i + 1) % n}): pass" for i in range(n))
    ),
    "chain of bases": lambda n: (
        SMALL.replace("(nn.Module)", f"(B{n})") + "\n".join(f"class B{i + 1}(B{i}): pass" for i in range(n))
    ),
    "diamonds": lambda n: (
        SMALL.replace("(nn.Module)", f"(B{n})")
        + "class B0:\n    def __init__(self): self.x = Norm(1)\n"
        + "\n".join(f"class B{i + 1}(B{i}, B{i}): pass" for i in range(n))
    ),
    "many norms": lambda n: _layer("return x", "\n".join(f"self.n{i} = Norm(1, 1)" for i in range(n))),
    "many activations": lambda n: (
        SMALL.replace("self.act = ", "\n        self.act = ".join([""] + ["ACT2FN[config.a]"] * n) + "\n        a = ")
        .replace("return self.down(", "x = a * b\n        " * n + "return self.down(")
    ),
    "many layers": lambda n: SMALL + "\n".join(
        f"class L{i}Layer(FuzzDecoderLayer): x = L{i + 1}Layer" for i in range(n)
    ) + "\nclass FuzzForCausalLM: x = L0Layer",
    "many methods": lambda n: SMALL.replace(
        "class Norm(nn.Module):",
        "class Norm(nn.Module):\n" + "".join(f"    def m{i}(self): pass\n" for i in range(n)),
    ).replace("dtype = x.dtype", "\n        ".join(f"self.m{i}()" for i in range(n))),
    "many functions": lambda n: SMALL.replace(
        "class Router(nn.Module):",
        "".join(f"def f{i}(): return f{i + 1}\n" for i in range(n)) + "class Router(nn.Module):\n    x = f0",
    ),
    "many routers": lambda n: SMALL + "".join(
        f"class R{i}Router:\n    def forward(self, x): return torch.topk(R{i + 1}Router, f{i})\n"
        f"def f{i}(): pass\n" for i in range(n)
    ) + "class FuzzForCausalLM: x = R0Router",
    "many gains": lambda n: SMALL.replace("dtype = x.dtype", "x = x * y\n        " * n + "dtype = x.dtype"),
    "many names": lambda n: _layer(
        "".join(f"if a{i}: x{i} = hidden_states\n" for i in range(n)) + "return hidden_states"
    ),
}  # fmt: skip
