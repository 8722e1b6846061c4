"""A one-layer decoder written to the plugin's conventions, and the same computed plainly.

Positions are embedded, so that a wrong position shows. Hidden states are whole on every rank.
"""

import torch
from safetensors.torch import save_file
from torch import nn
from vllm_neuron.vllm.spec_decode.decorator import async_speculative_decoding

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, MAX_LEN = 4, 2, 32, 256, 64, 1024


def toy_config():
    return {"window": None}


def toy_weights():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "embed.weight": draw(VOCAB, HIDDEN),
        "position": draw(MAX_LEN, HIDDEN),
        "q.weight": draw(HEADS * HEAD_DIM, HIDDEN) * 0.2,
        "k.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN) * 0.2,
        "v.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN) * 0.2,
        "o.weight": draw(HIDDEN, HEADS * HEAD_DIM) * 0.2,
        "head.weight": draw(VOCAB, HIDDEN) * 0.2,
    }


def save_toy(folder):
    save_file(toy_weights(), f"{folder}/model.safetensors")
    return str(folder)


def reference(token_ids, window=None):
    """Logits [T, VOCAB] by full attention over the whole sequence."""
    w = toy_weights()
    count = len(token_ids)
    hidden = w["embed.weight"][token_ids] + w["position"][:count]
    heads = {n: (hidden @ w[f"{n}.weight"].T).view(count, -1, HEAD_DIM).transpose(0, 1) for n in "qkv"}
    k, v = (heads[n].repeat_interleave(HEADS // KV_HEADS, 0) for n in "kv")
    distance = torch.arange(count)[:, None] - torch.arange(count)
    seen = (distance >= 0) & (distance < (window or count))
    scores = heads["q"] @ k.transpose(1, 2) * HEAD_DIM**-0.5
    mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    hidden = hidden + mixed.transpose(0, 1).reshape(count, -1) @ w["o.weight"].T
    return hidden @ w["head.weight"].T


@async_speculative_decoding
class Toy(nn.Module):
    def __init__(self, hf_config, neuron_config):
        super().__init__()
        from vllm.distributed.parallel_state import get_tp_group
        from vllm_neuron.nn import ColumnParallelLinear, Sampler, VocabDimShardedEmbedding
        from vllm_neuron.utils.weight_loader import (
            fused_qkv_weight_loader,
            set_weight_loader,
            sharding_weight_loader,
        )

        self.window = hf_config["window"]
        self.tp = get_tp_group()
        size, group = self.tp.world_size, self.tp.device_group
        self.kv_heads = KV_HEADS // size
        q_size, kv_size = HEADS // size * HEAD_DIM, self.kv_heads * HEAD_DIM
        self.embed = VocabDimShardedEmbedding(VOCAB, HIDDEN, tp_group=group)
        self.position = nn.Parameter(torch.empty(MAX_LEN, HIDDEN))
        self.qkv = nn.Parameter(torch.empty(HIDDEN, q_size + 2 * kv_size))
        set_weight_loader(
            self.qkv, fused_qkv_weight_loader(q_size, kv_size, 1, size, is_storage_transposed=True)
        )
        self.o = nn.Parameter(torch.empty(q_size, HIDDEN))
        set_weight_loader(self.o, sharding_weight_loader(0, q_size, size, is_storage_transposed=True))
        sampling = neuron_config.on_device_sampling_config
        self.head = ColumnParallelLinear(
            HIDDEN, VOCAB, bias=False, gather_output=not sampling, tp_group=group
        )
        self.sampler = Sampler(sampling, group) if sampling else None

    @classmethod
    def from_configs(cls, hf_config, neuron_config):
        return cls(hf_config, neuron_config)

    def load_weights(self, checkpoint_path, device, cache_dir):
        from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint

        mappings = {"qkv": ["q.weight", "k.weight", "v.weight"], "o": "o.weight"}
        result = SafetensorsCheckpoint(checkpoint_path, cache_dir).load_sharded_pipelined(
            self.tp.rank_in_group, self.tp.world_size, self, mappings, device
        )
        self.load_state_dict(result.state_dict, strict=False, assign=True)

    def get_kv_spec(self):
        from vllm_neuron.model.kv_cache import KVSpec, LayerSpec

        return KVSpec([LayerSpec("layers.0.self_attn", self.kv_heads, HEAD_DIM, torch.float32, self.window)])

    def bind_kv_cache(self, kv_caches):
        self.k_cache, self.v_cache = kv_caches["layers.0.self_attn"]

    def forward(
        self,
        input_ids,
        positions,
        attn_metadata,
        sampling_positions,
        sampling_params,
        spec_decode_metadata,
        rank,
        logit_mask,
    ):
        meta = attn_metadata["layers.0.self_attn"]
        hidden = self.embed(input_ids, scatter_tokens=False, rank=rank) + self.position[positions]
        decode = meta["max_query_len"] <= meta["decode_token_threshold"]
        output = self.decode(hidden, positions, meta) if decode else self.prefill(hidden, meta)
        self.tp.all_reduce(output)
        logits = self.head((hidden + output).index_select(0, sampling_positions))
        if self.sampler is None:
            return logits
        return self.sampler(logits, sampling_params, logit_mask, rank), None

    def prefill(self, hidden, meta):
        import vllm_neuron.functional as NF

        qkv = (hidden @ self.qkv).view(len(hidden), -1, HEAD_DIM).transpose(0, 1)
        q, k, v = qkv.split([len(qkv) - 2 * self.kv_heads, self.kv_heads, self.kv_heads])
        block, offset = meta["slot_mapping"] // meta["block_size"], meta["slot_mapping"] % meta["block_size"]
        self.k_cache[block, :, offset] = k.transpose(0, 1)
        self.v_cache[block, :, offset] = v.transpose(0, 1)
        if meta["kv_segment_size"]:
            mixed = NF.segmented_attention(
                q,
                self.k_cache,
                self.v_cache,
                meta["block_table_tensor"],
                meta["cached_seq_len"],
                meta["block_size"],
                meta["kv_segment_size"],
                sliding_window=self.window,
            )
        else:
            mixed = NF.flash_attention(q, k.transpose(1, 2), v, sliding_window=self.window)
        return mixed.transpose(0, 1).reshape(len(hidden), -1) @ self.o

    def decode(self, hidden, positions, meta):
        import vllm_neuron.functional as NF

        table = meta["block_table_tensor"]
        pos = positions.float()
        start = None
        if self.window is not None:
            pos = (pos - meta["swa_kv_pos_offset"]).clamp(min=0)
            start = (pos - self.window + 1).clamp(min=0).unsqueeze(0)
        mask = NF.gen_attention_decode_mask(
            pos.unsqueeze(0),
            bs=len(table),
            q_head=self.qkv.shape[1] // HEAD_DIM - 2 * self.kv_heads,
            s_active=1,
            s_prior=meta["max_blocks_per_seq"] * meta["block_size"],
            start_pos=start,
            block_len=meta["block_size"],
        )
        return NF.attention_decode(
            hidden.unsqueeze(1),
            W_qkv=self.qkv,
            active_blocks_table=table,
            K_cache=self.k_cache,
            V_cache=self.v_cache,
            attention_mask=mask,
            update_cache=True,
            kv_cache_update_idx=meta["slot_mapping"].unsqueeze(1),
            W_out=self.o,
        )
