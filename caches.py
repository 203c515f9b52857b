"""The other kind of state: a cache of keys and values, which grows (`softmax`) or is limited (`bounded`).

The rules of fastweight.RULES that have `keeps` are computed here, in place of the equation. Oren 2024, TOVA
(arXiv:2401.06104); Zhang 2023, H2O (2306.14048); Xiao 2023, StreamingLLM (2309.17453).
"""
import math

import torch
import torch.nn.functional as F

from fastweight import full_precision

# Heads may share keys and values (Ainslie 2023, arXiv:2305.13245): q has H heads, k and v have G, and each of
# these serves H / G heads of q that stand side by side. A cache keeps G of them.
def for_heads(x, H):
    """Repeat what groups of heads share, x (B, G, ..), for each of their heads -> (B, H, ..)"""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], 1)

def longer(x, new):
    """A cache x (B, G, T0, d) and the steps behind it, new (B, G, T, d) -> (B, G, T0 + T, d)"""
    return torch.cat([x, new], 2)

def softmax(q, k, v, cached=None, longer=longer):
    """Softmax attention with the same interface. Its state is the cache of all keys and values, and it grows.
    q (B, H, T, d)   k, v (B, G, T, d)   cached None or dict(k, v) of T0 tokens -> o, dict(k, v) of T0 + T
    longer: fast.caches.longer does the same without copying"""
    if cached is not None:
        k = longer(cached['k'], k)
        v = longer(cached['v'], v)
    T = q.shape[2]
    T_all = k.shape[2]
    mask = None
    if 1 < T < T_all:
        mask = q.new_ones(T, T_all, dtype=torch.bool).tril(T_all - T)
    causal = T == T_all > 1
    return attention(q, k, v, mask, is_causal=causal), dict(k=k, v=v)

def attention(q, k, v, mask=None, **how):
    """PyTorch's attention. On a GPU, its fast forms take shared heads only for a single query."""
    H, T = q.shape[1:3]
    if T > 1:
        k, v = for_heads(k, H), for_heads(v, H)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.shape[1] < H, **how)

def of_layer(a):
    return a.mean(1, keepdim=True).expand_as(a)

def newest_half(worth, pos, t, cache):
    """The worth, but the newest half of the cache stays."""
    return worth.masked_fill(pos > t - cache // 2, math.inf)

# A transformer is an RNN whose state, the cache of key/value pairs, grows. Limit the cache to `cache` tokens
# and the state has a fixed size (Oren 2024 sec. 3). A step sees the cached tokens and its own. If the cache
# was full, the token of least worth is then evicted; in a tie, the oldest. A policy computes the worth
# (B, G, tokens) from a, the attention weights of this step; total, the sum of a token's weights since it
# entered the cache; pos, the tokens' positions; v, their values; t, the position of this step. Heads that
# share keys decide together: a is the sum of their weights. `of_layer` averages over all heads. `mean`
# divides total by the token's age in steps, and `mean-v` also multiplies by the length of its value. `random`
# is a fixed hash, the same on every machine. In the code, `cached` is the cache, a dict of tensors with one
# entry per cached token. A new policy needs a line here and one in RULES.
POLICIES = {
    'window': lambda a, total, pos, v, t, cache, sinks: pos.float(),
    'sink': lambda a, total, pos, v, t, cache, sinks: pos.float().masked_fill(pos < sinks, math.inf),
    'h2o': lambda a, total, pos, v, t, cache, sinks: newest_half(total, pos, t, cache),
    'h2o-layer': lambda a, total, pos, v, t, cache, sinks: newest_half(of_layer(total), pos, t, cache),
    'mean': lambda a, total, pos, v, t, cache, sinks: newest_half(total / (t + 1 - pos), pos, t, cache),
    'mean-v': lambda a, total, pos, v, t, cache, sinks: (
        newest_half(total * v.norm(dim=-1) / (t + 1 - pos), pos, t, cache)),
    'tova': lambda a, total, pos, v, t, cache, sinks: of_layer(a),
    'tova-sink': lambda a, total, pos, v, t, cache, sinks: (
        of_layer(a).masked_fill(pos < sinks, math.inf)),
    'tova-head': lambda a, total, pos, v, t, cache, sinks: a,
    'random': lambda a, total, pos, v, t, cache, sinks: ((pos * 40503 + t * 30011) % 65537).float(),
}
NEVER = -1e30   # the score of a masked token; -inf would give NaN where all are masked

GAPS = {        # --positions: what is left of the part of a gap above 10. Oren 2024, appendix
    'compress': lambda above: (above + math.e).log().log(), 'log': torch.log1p, 'sqrt': torch.sqrt}

def compressed(pos, positions='compress'):
    """Shorten each gap g > 10 between positions: by `compress` to ceil(10 + ln ln(g - 10 + e)), 11 to 13. The
    positions (B, G, tokens) come in any order. Oren 2024, appendix, and the authors' code."""
    in_order, order = pos.sort()
    gap = in_order.diff(dim=-1, prepend=in_order[..., :1]).float()
    above = (gap - 10).clamp(min=0)
    near = (gap.clamp(max=10) + GAPS[positions](above)).ceil().cumsum(-1)
    return torch.zeros_like(near).scatter(-1, order, near)

def nearer(own, gap, positions='compress'):
    """From where a query at `own` (.., T) asks for tokens before the one long gap (.., T) between cached
    tokens, once this is `compressed`."""
    return own - gap + compressed(torch.stack([0 * gap, gap], -1), positions)[..., 1]

def empty_slots(k, cache):
    """A cache with `cache` empty slots, marked by pos = -1. k (B, G, T, d)"""
    B, G, _, d = k.shape
    empty = k.new_zeros(B, G, cache, d)
    total = torch.zeros(B, G, cache, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    return dict(k=empty, v=empty, pos=total.long() - 1, total=total)

def append(cached, k, v, t):
    """Append the steps t, t + 1, ... to the cache. Their keys and values are k, v (B, G, T, d)."""
    steps = t + torch.arange(k.shape[2], device=k.device)
    pos = steps.expand(k.shape[:3])
    new = dict(k=k, v=v, pos=pos, total=torch.zeros_like(pos, dtype=cached['total'].dtype))
    return {name: torch.cat([cached[name], new[name]], 2) for name in new}

def wide_index(index, x):
    """index (B, G, n) in the shape in which gather and scatter take it for x (B, G, tokens) or (.., d)"""
    if x.dim() == 4:
        return index[..., None].expand(-1, -1, -1, x.shape[-1])
    return index

def pick(cached, index):
    """The cached tokens at index (B, G, n)."""
    return {name: x.gather(2, wide_index(index, x)) for name, x in cached.items()}

def replaced(cached, index):
    """The cache without the token at index (B, G, 1). The last token moves into its slot. `cached` comes from
    `append`, which copies, so where no backward needs it, it is changed in place."""
    kept = {}
    for name, x in cached.items():
        scatter = x.scatter if torch.is_grad_enabled() else x.scatter_
        last = x[:, :, -1:].clone()
        kept[name] = scatter(2, wide_index(index, x), last)[:, :, :-1]
    return kept

def cached_scores(q, k):
    """q.k / sqrt(d): q (B, H, T, d), k (B, G, tokens, d) -> (B, G, H / G, T, tokens)"""
    q = q.to(k.dtype).unflatten(1, (k.shape[1], -1))
    scores = q.flatten(2, 3) @ k.mT                                 # heads that share k side by side
    return scores.view(*q.shape[:4], -1) * q.shape[-1] ** -0.5

def rotate_nearer(q, k, pos, rope, positions):
    """Rotate q (B, H, T, d), of the last T tokens, and k (B, G, tokens, d) by `compressed` positions."""
    pos = compressed(pos, positions)
    own = for_heads(pos[:, :, -q.shape[2]:], q.shape[1])
    return rope(q, own), rope(k, pos)

def attend_cached(q, cached, seen, rotate=None, scores=None):
    """Softmax attention of q (B, H, T, d) under the mask `seen` (B, G, 1|T, tokens). The last T cached tokens
    are q's own. scores: `cached_scores`, if they are known  ->  o (B, H, T, d), the weights, summed over the
    H / G heads that share keys, (B, G, T, tokens), log of the denominators (B, H, T, 1)"""
    k = cached['k']
    if rotate is not None:
        q, k = rotate(q, k, cached['pos'])
    if scores is None:
        scores = cached_scores(q, k)
    scores = scores.to(cached['total'].dtype).masked_fill(~seen[:, :, None], NEVER)
    weights = scores.softmax(-1)
    top = scores.argmax(-1, keepdim=True)                           # torch.logsumexp is slow with NEVER
    log_sum = scores.gather(-1, top) - weights.gather(-1, top).log()
    o = weights.to(k.dtype).flatten(2, 3) @ cached['v']
    return o.view_as(q).to(q.dtype), weights.sum(2), log_sum.flatten(1, 2)

def bounded_step(q, k, v, cached, t, policy, cache, sinks, spill, rotate):
    """`bounded` for one step: append the step, attend, score the cached tokens, evict one."""
    cached = append(cached, k, v, t)
    real = cached['pos'] >= 0
    o, a, log_mass = attend_cached(q, cached, real[:, :, None], rotate)
    total = cached['total'] + a[:, :, 0]
    worth = POLICIES[policy](a[:, :, 0], total, cached['pos'], cached['v'], t, cache, sinks)
    worth = worth.nan_to_num(0).masked_fill(~real, -math.inf)       # evict empty slots first
    worst = worth == worth.amin(-1, keepdim=True)
    gone = torch.where(worst, cached['pos'], t + 1).argmin(-1, keepdim=True)
    if spill:                                                       # the first read only gave the scores
        place = torch.arange(cache + 1, device=q.device)
        stays = real & (place != gone)
        o, a, log_mass = attend_cached(q, cached, stays[:, :, None], rotate)
        total = cached['total'] + a[:, :, 0]
    cached['total'] = total
    return o, log_mass, pick(cached, gone), replaced(cached, gone)

def joined(parts):
    """The results of `bounded` for a text, from its results for the parts."""
    if len(parts) == 1:
        return parts[0]
    o, log_mass, went, cached = zip(*parts)
    went = {name: torch.cat([part[name] for part in went], 2) for name in went[0]}
    return torch.cat(o, 2), torch.cat(log_mass, 2), went, cached[-1]

@full_precision
def bounded(q, k, v, cached, t, policy, cache, sinks=0, spill=False, rotate=None):
    """Softmax attention with at most `cache` cached tokens: the definition, step by step.
    q (B, H, T, d)   k, v (B, G, T, d)   t position of the first step   policy from POLICIES
    sinks < cache: how many first tokens `sink` and `tova-sink` never evict
    cached None, or the cache that the last call returned: k, v (B, G, cache, d), pos, total (B, G, cache),
    in any order. pos is -1 in an empty slot.
    spill: evict before the step reads. The evicted token then goes into a matrix and must not count twice.
    HybridCache in models/hybrid.py averages cache and matrix by their denominators.
    rotate(q, k, pos): `rotate_nearer`, with rope. Keys then come without it.
    ->  o (B, H, T, d), log of the denominators (B, H, T, 1), the T evicted tokens, one per step, the cache"""
    if cached is None:
        cached = empty_slots(k, cache)
    steps = []
    for i in range(q.shape[2]):
        q_t, k_t, v_t = (x[:, :, i:i + 1] for x in (q, k, v))
        steps.append(bounded_step(q_t, k_t, v_t, cached, t + i, policy, cache, sinks, spill, rotate))
        cached = steps[-1][-1]
    return joined(steps)

