"""How a checkpoint lays out its weights: verdicts from names and shapes, and what they cannot tell."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from autoport.research.inspection import KeyRow, fold_keys
from autoport.research.quantization import evidence
from autoport.schema.facts import Checkpoint

# Order of rows in a fused q, k, v tensor, which shapes do not tell; by model type, read in the modeling files.
PER_HEAD = "per head: q, k, v of head 0, then of head 1, ... (h, 3, d)"
GROUPED = "per group: the query heads of a KV head, its k, its v"
CONCAT = "all of q, then all of k, then all of v"
QKV_ORDER = {
    "baichuan": CONCAT,
    "bloom": PER_HEAD,
    "codegen": "4 blocks, each with its part of q, v and k",
    "dbrx": CONCAT,
    "gpt-sw3": CONCAT,
    "gpt2": CONCAT,
    "gpt_neox": PER_HEAD,
    "gpt_neox_japanese": PER_HEAD,
    "internlm2": GROUPED,
    "mpt": CONCAT,
    "openai-gpt": CONCAT,
    "persimmon": PER_HEAD,
    "phi3": CONCAT,
    "qwen": CONCAT,
}
FUSED_QKV = re.compile(r"(qkv_proj|query_key_value|c_attn|W_pack|Wqkv|qkv|wqkv)\.weight$")
SEPARATE_QKV = re.compile(r"(q_proj|wq|query|q_lin|q_a_proj|q_b_proj)\.weight$")
FUSED_GATE_UP = re.compile(r"(gate_up_proj|dense_h_to_4h_gate|Wi|w1_w3|input_linear)(\.weight)?$")
PER_EXPERT = re.compile(r"experts\.(\d+)\.")
STACKED = re.compile(
    r"experts(\.mlp)?\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|v1|w2|fc1|fc2)(\.weight)?$"
)
DECODER_PART = re.compile(r"(^|\.)(language_model|text_model)\.")
OTHER_TOWER = re.compile(r"(^|\.)(vision|visual|image|audio|multi_modal|mm_projector)")
KNOWN_PREFIXES = (
    "model.language_model.", "language_model.model.", "language_model.", "model.decoder.", "transformer.",
    "gpt_neox.", "backbone.", "model.", "",
)  # fmt: skip


class Verdict(msgspec.Struct, frozen=True):
    """One statement on the layout, and the keys and shapes that it rests on."""

    part: str
    verdict: str
    evidence: str


def describe_layout(checkpoint: Checkpoint, config: Mapping[str, Any] | None = None) -> list[Verdict]:
    """Verdicts on prefix, q/k/v, gate and up, experts, orientation, head and quantisation.

    Args:
        config: The decoder's config, for orders that shapes do not tell.
    """
    rows = _decoder_rows(fold_keys(checkpoint))
    config = config or {}
    verdicts = [
        *_prefix(rows),
        *_qkv(rows, config),
        *_gate_up(rows),
        *_experts(rows, config),
        *_orientation(rows),
        *_head(checkpoint),
    ]
    for form, keys in evidence(checkpoint).items():
        verdicts.append(Verdict("quantisation", form.name, f"{len(keys)} keys such as {keys[0]}"))
    return verdicts


def _decoder_rows(rows: list[KeyRow]) -> list[KeyRow]:
    """The rows of the decoder: towers for images and sound are laid out in ways of their own."""
    named = [row for row in rows if DECODER_PART.search(row.key) and not OTHER_TOWER.search(row.key)]
    return named or [row for row in rows if not OTHER_TOWER.search(row.key)]


def _shown(row: KeyRow) -> str:
    return f"{row.key} {list(row.shape)}"


def _prefix(rows: Iterable[KeyRow]) -> Iterator[Verdict]:
    layer = next((row for row in rows if re.search(r"(^|\.)(layers|h|blocks|block)\.\{i\}\.", row.key)), None)
    if layer is None:
        yield Verdict("prefix", "no key looks like one of a layer", "all keys")
        return
    stem = re.split(r"(?:layers|h|blocks|block)\.\{i\}\.", layer.key)[0]
    known = stem in KNOWN_PREFIXES
    yield Verdict("prefix", f"{stem!r}" + ("" if known else ", which is unusual"), layer.key)


def _qkv(rows: Iterable[KeyRow], config: Mapping[str, Any]) -> Iterator[Verdict]:
    fused = next((row for row in rows if FUSED_QKV.search(row.key) and "experts" not in row.key), None)
    separate = next((row for row in rows if SEPARATE_QKV.search(row.key)), None)
    if fused is None:
        if separate is not None:
            latent = "q_a_proj" in separate.key or "q_b_proj" in separate.key
            kind = "multi-head latent attention: low-rank pairs" if latent else "separate tensors"
            yield Verdict("q, k, v", kind, _shown(separate))
        return
    model_type = str(config.get("model_type", ""))
    order = QKV_ORDER.get(model_type)
    if model_type == "falcon":
        grouped = bool(config.get("new_decoder_architecture"))
        order = GROUPED if grouped else CONCAT if config.get("multi_query", True) else PER_HEAD
    if model_type == "gpt_bigcode":
        order = CONCAT if config.get("multi_query", True) else PER_HEAD
    text = order or "in an order that shapes do not tell: read the modeling file"
    yield Verdict("q, k, v", f"one tensor, {text}", _shown(fused))


def _gate_up(rows: Iterable[KeyRow]) -> Iterator[Verdict]:
    for row in rows:
        if FUSED_GATE_UP.search(row.key) and "experts" not in row.key and len(row.shape) == 2:
            yield Verdict("gate, up", "one tensor, all of gate, then all of up", _shown(row))
            return


def _experts(rows: list[KeyRow], config: Mapping[str, Any]) -> Iterator[Verdict]:
    single = next((row for row in rows if PER_EXPERT.search(row.key) and row.key.endswith("weight")), None)
    if single is not None:
        yield Verdict("experts", "a tensor for each expert and projection", _shown(single))
        return
    stacked = {
        row.key.split("experts.")[-1].removesuffix(".weight"): row for row in rows if STACKED.search(row.key)
    }
    down = next((stacked[name] for name in ("down_proj", "fc2") if name in stacked), None)
    both = next((stacked[name] for name in ("gate_up_proj", "fc1") if name in stacked), None)
    if both is not None and len(both.shape) == 3:
        yield Verdict("experts", _stacked(both, down, config), _shown(both))
    elif stacked:
        row = next(iter(stacked.values()))
        flat = len(row.shape) == 2
        text = (
            "one tensor for all experts, rows [experts * size]" if flat else "one tensor for each projection"
        )
        yield Verdict("experts", text, _shown(row))


def _stacked(both: KeyRow, down: KeyRow | None, config: Mapping[str, Any]) -> str:
    """[E, 2I, H] or [E, H, 2I]: told by the hidden size, else by down_proj, which is [E, H, I] or [E, I, H]."""
    _, rows, columns = both.shape
    hidden = config.get("hidden_size")
    rows_are_both: bool | None = None
    if rows != columns:
        if hidden in (rows, columns):
            rows_are_both = columns == hidden
        elif down is not None and len(down.shape) == 3 and 2 * down.shape[1] in (rows, columns):
            rows_are_both = 2 * down.shape[2] == rows
    elif down is not None and len(down.shape) == 3 and down.shape[1] != down.shape[2]:
        rows_are_both = 2 * down.shape[2] == rows
    if rows_are_both is None:
        return "stacked for all experts; which axis holds gate and up is not told by the shapes"
    if rows_are_both:
        return "stacked for all experts [E, 2I, H]: gate rows, then up rows"
    if config.get("model_type") == "gpt_oss":
        return "stacked for all experts and transposed [E, H, 2I]: gate and up columns alternate"
    return "stacked for all experts and transposed [E, H, 2I]: gate columns, then up columns"


def _orientation(rows: Iterable[KeyRow]) -> Iterator[Verdict]:
    for row in rows:
        if row.key.endswith(("c_attn.weight", "c_fc.weight")) and len(row.shape) == 2:
            transposed = row.shape[1] in (3 * row.shape[0], 4 * row.shape[0])
            if transposed:
                yield Verdict(
                    "orientation", "Conv1D: linear weights are [in, out], not [out, in]", _shown(row)
                )
            return


def _head(checkpoint: Checkpoint) -> Iterator[Verdict]:
    names = ("lm_head.weight", "embed_out.weight", "output.weight", "head.weight", "output_projection.weight")
    head = next((key for key in checkpoint.tensors if key.endswith(names)), None)
    embedding = next(
        (
            key
            for key in checkpoint.tensors
            if re.search(r"(embed_tokens|wte|embed_in|word_embeddings|tok_emb)", key)
        ),
        None,
    )
    if head is None and embedding is not None:
        yield Verdict("head", "none in the file: tied to the embedding, or an embedding model", embedding)
    elif head is not None and embedding is None:
        yield Verdict("head", "a head without an embedding: tied, stored under the head's name", head)
    elif head is not None:
        bias = f"{head.removesuffix('weight')}bias" in checkpoint.tensors
        yield Verdict("head", "a tensor of its own" + (", with a bias" if bias else ""), head)
