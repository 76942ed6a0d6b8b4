#!/usr/bin/env python3
"""Run a (tiny) Hugging Face checkpoint with transformers on CPU and record what it computes.

    python transformers_oracle.py MODEL_DIR --random 48 --greedy 16 --trace --check --out oracle.npz
    python transformers_oracle.py MODEL_DIR --ids 5,17,300,42 --out oracle.npz
    python transformers_oracle.py MODEL_DIR --text "2 + 2 =" --chat --out oracle.npz

FP8 tensors are dequantized here (not by transformers, see below), names and layout are
mapped by transformers. Attention and experts run in their plain eager form.

Arrays written:

  input_ids          [T]      the prompt
  logits             [T, V]   every position, one prefill without a cache
  greedy_ids         [N]      greedy continuation (cache, one token at a time)
  greedy_logits      [N, V]   the logits each of those was taken from
  with --trace, over the prompt, L = number of layers:
  hidden_in          [T, H]   embedding, before the first layer
  hidden.<layer>     [T, H] or [T, S, H]  output of the layer (S residual streams with mHC)
  hidden_final       [T, H]   after the last norm, the input of the head
  router_ids.<layer>     [T, K]  chosen experts, ascending
  router_weights.<layer> [T, K]  their weights (normalized and scaled), same order
  router_margin.<layer>  [T]     selection score of the worst chosen minus the best refused
  dsa_ids.<layer>    [T, W]   attended positions, ascending, -1 padded (sparse layers)
  dsa_margin.<layer> [T]      index score of the worst chosen minus the best refused
                              candidate; inf where nothing was refused
  with --mtp:
  mtp_logits         [T-1, V] row p: NextN layer fed with hidden_final[p] and embed(x[p+1]);
                              it predicts x[p+2]
  with --check:
  check_*                     largest differences, see the printed lines

A comparison of choices (experts, pools) is only meaningful where the margin is larger than
the numerical error of the implementation under test; a tie at the boundary is undefined.

Why not transformers' own FP8 loading: without a GPU it dequantizes to the dtype of the
model, but it takes the block size to be rows / scale_rows, which is wrong when the last
block is partial (a 192-row weight in blocks of 128), and needs `accelerate`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402


def read_tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of a sharded checkpoint, block-scaled FP8 multiplied out, in float32."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        (single,) = model_dir.glob("*.safetensors")
        with safe_open(single, framework="pt") as f:
            weight_map = dict.fromkeys(f.keys(), single.name)
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(model_dir / file, framework="pt") as f:
            for name in f.keys():
                raw[name] = f.get_tensor(name)
    if set(raw) != set(weight_map):
        raise SystemExit("the index and the shards disagree about the tensor names")
    quant = json.loads((model_dir / "config.json").read_text()).get("quantization_config") or {}
    block = quant.get("weight_block_size", [128, 128])
    out = {}
    for name, t in raw.items():
        if name.endswith(".weight_scale_inv"):
            continue
        scale = raw.get(name + "_scale_inv")
        if t.dtype == torch.float8_e4m3fn:
            if scale is None:
                raise SystemExit(f"{name}: float8 without a scale")
            full = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            out[name] = t.float() * full[: t.shape[0], : t.shape[1]]
        elif scale is not None:
            raise SystemExit(f"{name}: a scale, but dtype {t.dtype}")
        else:
            out[name] = t.float()
    return out


def load(model_dir: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype):
    """Instantiate with transformers from an unquantized float32 copy in a scratch directory."""
    import transformers

    config = json.loads((model_dir / "config.json").read_text())
    config.pop("quantization_config", None)
    config.pop("auto_map", None)
    if config["model_type"] == "kimi_k2":  # the release's name for DeepseekV3ForCausalLM
        config["model_type"] = "deepseek_v3"
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(config))
        save_file(
            {k: v.contiguous() for k, v in tensors.items()},
            Path(scratch, "model.safetensors"),
            metadata={"format": "pt"},
        )
        cls = getattr(transformers, config["architectures"][0])
        model, info = cls.from_pretrained(
            scratch,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    extra = [k for k in info["unexpected_keys"] if not is_mtp(k, config)]
    missing = [k for k in info["missing_keys"] if ".visual." not in k]
    if missing or extra or info["mismatched_keys"]:
        raise SystemExit(
            f"load: missing {missing[:4]} unexpected {extra[:4]} mismatched {list(info['mismatched_keys'])[:4]}"
        )
    return model.to(dtype).eval(), config


def is_mtp(name: str, config: dict) -> bool:
    return f".layers.{config.get('text_config', config)['num_hidden_layers']}." in name


def text_model(model):
    return model.model.language_model if hasattr(model.model, "language_model") else model.model


class Trace:
    """Forward hooks that copy out layer outputs, expert choices and sparse selections."""

    def __init__(self, model):
        self.data: dict[str, np.ndarray] = {}
        self.handles = []
        body = text_model(model)
        for i, layer in enumerate(body.layers):
            self.handles.append(layer.register_forward_hook(self.layer_hook(i)))
            if i == 0:
                self.handles.append(layer.register_forward_pre_hook(self.first_hook, with_kwargs=True))
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                self.handles.append(gate.register_forward_hook(self.router_hook(i)))
            indexer = getattr(layer.self_attn, "indexer", None)
            if indexer is not None:
                self.handles.append(indexer.register_forward_hook(self.dsa_hook(i), with_kwargs=True))
        self.handles.append(body.norm.register_forward_hook(self.final_hook))

    def close(self):
        for h in self.handles:
            h.remove()

    def first_hook(self, module, args, kwargs):
        h = args[0] if args else kwargs["hidden_states"]
        self.data["hidden_in"] = (h[0, :, 0] if h.dim() == 4 else h[0]).float().numpy().copy()

    def final_hook(self, module, args, out):
        self.data["hidden_final"] = out[0].float().numpy().copy()

    def layer_hook(self, i):
        def hook(module, args, out):
            h = out[0] if isinstance(out, tuple) else out
            self.data[f"hidden.{i}"] = h[0].float().numpy().copy()

        return hook

    def router_hook(self, i):
        def hook(module, args, out):
            logits, weights, ids = out
            order = ids.argsort(-1)
            self.data[f"router_ids.{i}"] = ids.gather(-1, order).numpy().astype(np.int32)
            self.data[f"router_weights.{i}"] = weights.gather(-1, order).float().numpy()
            score = logits.sigmoid() + module.e_score_correction_bias
            refused = score.clone().scatter_(-1, ids, -torch.inf)
            groups, keep = module.num_group, module.topk_group
            if keep < groups:  # only experts of the kept groups compete
                per = score.view(len(score), groups, -1)
                kept = per.topk(2, -1)[0].sum(-1).topk(keep, -1)[1]
                mask = torch.zeros(len(score), groups, dtype=torch.bool).scatter_(1, kept, True)
                refused = refused.view_as(per).masked_fill(~mask[..., None], -torch.inf).view_as(score)
            margin = score.gather(-1, ids).amin(-1) - refused.amax(-1)
            self.data[f"router_margin.{i}"] = margin.float().numpy()

        return hook

    def dsa_hook(self, i):
        def hook(module, args, kwargs, out):
            ids = out[0].long()
            width = ids.shape[-1]
            length = ids.shape[0]
            # positions in the future of a query (a top-k wider than the past) are not attended
            ids = torch.where(ids > torch.arange(length)[:, None], -1, ids)
            big = torch.where(ids < 0, length + 1, ids).sort(-1)[0]
            self.data[f"dsa_ids.{i}"] = torch.where(big > length, -1, big)[:, :width].numpy().astype(np.int32)
            self.data[f"dsa_margin.{i}"] = dsa_margin(module, args, kwargs, ids)

        return hook


def dsa_margin(module, args, kwargs, ids):
    """Recompute the index scores of a full prefill and measure the gap at the cut."""

    def arg(position, name):
        return args[position] if len(args) > position else kwargs[name]

    h, q_resid = arg(0, "hidden_states")[0], arg(1, "q_resid")[0]
    t, d, nh = h.shape[0], module.head_dim, module.n_heads
    q = module.wq_b(q_resid).view(t, nh, d)
    k = module.k_norm(module.wk(h))
    pool = getattr(module, "index_kpool", 1)
    if hasattr(module, "index_kpool_compress_ape"):
        n = t // pool
        gate = (h @ module.index_kpool_compress_gate.T)[: n * pool].view(n, pool, d)
        p = (gate + module.index_kpool_compress_ape).softmax(1)
        k = (p * k[: n * pool].view(n, pool, d)).sum(1)
    else:
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave as rope

        cos, sin = arg(2, "position_embeddings")
        r = module.qk_rope_head_dim
        qr, kr = rope(q[None, ..., :r], k[None, :, None, :r], cos, sin, unsqueeze_dim=2)
        q, k = torch.cat([qr[0], q[..., r:]], -1), torch.cat([kr[0, :, 0], k[:, r:]], -1)
    s = torch.relu(torch.einsum("thd,pd->thp", q.float(), k.float()) * d**-0.5)
    score = torch.einsum("th,thp->tp", module.weights_proj(h).float() * nh**-0.5, s)
    out = np.full(t, np.inf, np.float32)
    for i in range(t):
        visible = (i + 1) // pool
        chosen = torch.zeros(visible, dtype=torch.bool)
        sel = ids[i][ids[i] >= 0] // pool
        chosen[sel[sel < visible]] = True
        row = score[i, :visible]
        if chosen.any() and not chosen.all():
            out[i] = (row[chosen].min() - row[~chosen].max()).item()
    return out


@torch.no_grad()
def prefill(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0]


@torch.no_grad()
def stepwise(model, ids: torch.Tensor, greedy: int, first: int):
    """Feed ``first`` tokens at once, the rest one by one, then continue greedily."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    rows, new, new_rows = [], [], []
    out = model(input_ids=ids[None, :first], cache=cache, use_cache=True).logits[0]
    rows.append(out)
    for i in range(first, len(ids)):
        rows.append(model(input_ids=ids[None, i : i + 1], cache=cache, use_cache=True).logits[0])
    last = rows[-1][-1]
    for _ in range(greedy):
        token = int(last.argmax())
        new.append(token)
        new_rows.append(last)
        last = model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1]
    return torch.cat(rows), new, new_rows


@torch.no_grad()
def mtp(
    model, config: dict, tensors: dict[str, torch.Tensor], ids: torch.Tensor, hidden: torch.Tensor, zero_first: bool
) -> torch.Tensor:
    """The NextN layer as a plain pre-norm block of the model's own attention and MoE classes."""
    body = text_model(model)
    conf = body.config
    layer = conf.num_hidden_layers
    (prefix,) = {k.split(f"layers.{layer}.")[0] + f"layers.{layer}." for k in tensors if is_mtp(k, config)}
    own = {k[len(prefix) :]: v.to(hidden.dtype) for k, v in tensors.items() if k.startswith(prefix)}
    sample = next(
        x
        for x in body.layers
        if hasattr(x.self_attn, "kv_b_proj")
        and hasattr(x.mlp, "gate")
        and getattr(x.self_attn, "indexer", True) is not None
    )
    import copy

    block = copy.deepcopy(sample)
    block.self_attn.layer_idx = 0
    state = {}
    n = conf.n_routed_experts
    for k, v in own.items():
        if k.startswith(("self_attn.", "input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.shared")):
            state[k] = v
    for part, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        state[f"mlp.experts.{part}"] = torch.stack(
            [torch.cat([own[f"mlp.experts.{e}.{x}.weight"] for x in names]) for e in range(n)]
        )
    left = block.load_state_dict(state, strict=False)
    assert not left.unexpected_keys and all("_hc" in k for k in left.missing_keys), left

    def rms(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + conf.rms_norm_eps) * weight

    embed = body.embed_tokens(ids[1:])
    if zero_first:
        embed[0] = 0
    x = torch.cat([rms(embed, own["enorm.weight"]), rms(hidden[:-1], own["hnorm.weight"])], -1)
    x = (x @ own["eh_proj.weight"].T)[None]
    t = x.shape[1]
    kwargs = {"hidden_states": block.input_layernorm(x)}
    if conf.model_type == "glm5_next_text":
        kwargs["attention_mask"] = torch.ones(1, t, dtype=torch.bool)
    else:
        causal = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        kwargs |= {
            "attention_mask": causal,
            "position_embeddings": body.rotary_emb(x, position_ids=torch.arange(t)[None]),
        }
    x = x + block.self_attn(**kwargs)[0]
    x = x + block.mlp(block.post_attention_layernorm(x))
    return rms(x[0], own["shared_head.norm.weight"]) @ model.lm_head.weight.T


def encode(model_dir: Path, text: str, chat: bool) -> list[int]:
    from tokenizers import Tokenizer

    if not (model_dir / "tokenizer.json").exists():
        raise SystemExit("no tokenizer.json (tiktoken releases): give --ids")
    if chat:
        import jinja2

        env = jinja2.Environment()
        env.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
        template = env.from_string((model_dir / "chat_template.jinja").read_text())
        text = template.render(messages=[{"role": "user", "content": text}], add_generation_prompt=True)
    return Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def report(name: str, a: torch.Tensor, b: torch.Tensor, out: dict) -> None:
    diff = (a - b).abs().max().item()
    rel = ((a - b).norm() / b.norm()).item()
    same = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
    out[f"check_{name}"] = np.array([diff, rel, same])
    print(f"  {name}: max abs {diff:.2e}, rel L2 {rel:.2e}, same argmax {same:.1%}")


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    src = p.add_mutually_exclusive_group(required=True)
    src.add_argument("--ids", help="comma-separated token ids, or @FILE with a JSON list")
    src.add_argument("--random", type=int, metavar="N", help="N random token ids")
    src.add_argument("--text")
    p.add_argument("--chat", action="store_true", help="wrap --text in the chat template")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--greedy", type=int, default=0, metavar="N")
    p.add_argument("--trace", action="store_true", help="hidden states, experts, sparse selections")
    p.add_argument("--mtp", action="store_true", help="draft logits of the NextN layer")
    p.add_argument("--mtp-zero-first", action="store_true", help="zero the embedding at position 0, as vLLM does")
    p.add_argument(
        "--check", action="store_true", help="compare the prefill with the one-token-at-a-time and the float64 run"
    )
    p.add_argument("--threads", type=int, default=1, help="more only helps on idle cores")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args(argv)
    torch.set_num_threads(a.threads)

    started = time.time()
    tensors = read_tensors(a.model)
    model, config = load(a.model, tensors, torch.float32)
    vocab = config.get("text_config", config)["vocab_size"]
    if a.ids:
        ids = json.loads(Path(a.ids[1:]).read_text()) if a.ids[0] == "@" else [int(x) for x in a.ids.split(",")]
    elif a.random:
        ids = np.random.default_rng(a.seed).integers(0, vocab - 80, a.random).tolist()
    else:
        ids = encode(a.model, a.text, a.chat)
    ids = torch.tensor(ids)
    print(f"loaded in {time.time() - started:.1f} s; {len(ids)} tokens")

    result: dict[str, np.ndarray] = {"input_ids": ids.numpy().astype(np.int64)}
    trace = Trace(model)
    started = time.time()
    logits = prefill(model, ids)
    trace.close()
    print(f"prefill {time.time() - started:.2f} s")
    result["logits"] = logits.numpy()
    if a.trace:
        result |= trace.data
        for kind in ("router", "dsa"):
            m = [v.min() for k, v in trace.data.items() if k.startswith(f"{kind}_margin")]
            cut = sum(int(np.isfinite(v).sum()) for k, v in trace.data.items() if k.startswith(f"{kind}_margin"))
            if m:
                print(f"  {kind}: smallest margin {min(m):.2e} over {cut} cuts")
    if a.mtp:
        hidden = torch.from_numpy(trace.data["hidden_final"])
        result["mtp_logits"] = mtp(model, config, tensors, ids, hidden, a.mtp_zero_first).numpy()
    if a.greedy or a.check:
        # The first step through an empty cache needs at least a prefill; one token is enough.
        rows, new, new_rows = stepwise(model, ids, a.greedy, first=len(ids) if not a.check else 1)
        if a.check:
            report("one token at a time", rows, logits, result)
            half = stepwise(model, ids, 0, first=len(ids) // 2)[0]
            report("half prefill, then one at a time", half, logits, result)
        if a.greedy:
            result["greedy_ids"] = np.array(new, np.int64)
            result["greedy_logits"] = torch.stack(new_rows).numpy()
            print("  greedy:", new)
    if a.check:
        report("float64 weights and activations", prefill(model.double(), ids).float(), logits, result)
    np.savez_compressed(a.out, **result)
    print(f"wrote {a.out}")


if __name__ == "__main__":
    main()
