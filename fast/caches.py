"""A cache of keys and values, faster: `bounded` computes many steps together, `longer` copies less often.

Each gives what its definition gives, which has the same name and says what the arguments mean. Here the
definition of bounded is called `step_by_step`, that of longer `copied`. They run where nothing is faster.
"""
import math

import torch

from caches import (NEVER, POLICIES, append, attend_cached, bounded as step_by_step, bounded_step,
                    cached_scores, empty_slots, for_heads, joined, longer as copied, nearer, pick)
from fastweight import full_precision

STEPS = 64      # at a time: as many columns more than the cache has
ON_GPU = 4      # times as many on a GPU, where each piece waits for the launches of its operations

@full_precision
def bounded(q, k, v, cached, t, policy, cache, sinks=0, spill=False, rotate=None):
    """As the definition. For window and sink, positions alone say which tokens are evicted. With any
    policy, empty slots are evicted first. Steps whose evictions are known are computed together. The others
    share two products. With `rotate`, their evictions move positions: they go one by one, by the definition.
    """
    T = q.shape[2]
    if cached is None:
        cached = empty_slots(k, cache)
    how = policy, cache, sinks, spill, rotate
    if T == 1:
        return bounded_step(q, k, v, cached, t, *how)
    by_position = policy in ('window', 'sink')
    most = ON_GPU * STEPS if q.is_cuda else STEPS
    parts = []
    i = 0
    while i < T:
        n = min(T - i, most)
        form = together
        if not by_position:
            empty = int((cached['pos'][0, 0] < 0).sum())
            if empty:
                n = min(n, empty)
            else:
                form = by_worth if rotate is None else step_by_step
        some = [x[:, :, i:i + n] for x in (q, k, v)]
        parts.append(form(*some, cached, t + i, *how))
        cached = parts[-1][-1]
        i += n
    return joined(parts)


def together(q, k, v, cached, t, policy, cache, sinks, spill, rotate):
    """`bounded` for steps whose evictions are known."""
    T = q.shape[2]
    cached = append(cached, k, v, t)
    pos = cached['pos'][:, :, None]                     # (B, G, 1, cache + T)
    now = t + torch.arange(T, device=q.device)[:, None]
    stays = sinks if policy == 'sink' else 0            # positions below are never evicted
    seen = (pos >= 0) & (pos <= now)
    first = (cached['pos'] >= 0) & (cached['pos'] < stays)
    scores = None
    if policy in ('window', 'sink'):
        room = cache - first.sum(-1)[:, :, None, None]
        near = now - pos <= room - int(spill)           # not yet evicted
        seen = seen & (near | (pos < stays))
        if rotate is not None:
            scores = scores_from_nearer(q, cached, now - room, stays, rotate)
            rotate = None
    o, weights, log_mass = attend_cached(q, cached, seen, rotate, scores)
    cached['total'] = cached['total'] + weights.sum(2)
    order = cached['pos'].masked_fill(first, t + T).sort(dim=-1, stable=True).indices
    gone, kept = order.split([T, cache], -1)
    return o, log_mass, pick(cached, gone), pick(cached, kept)


def scores_from_nearer(q, cached, begins, sinks, rotate):
    """The scores for window and sink with keys that are rotated by shortened positions. Only the gap between
    the sinks and the window is long. So the window is found by true positions, and the sinks by a position of
    the query from which this gap is shortened. begins (B, G, T, 1): the first position of each window"""
    rope = rotate.keywords['rope']
    positions = rotate.keywords['positions']
    pos = cached['pos']
    own = pos[:, :, -q.shape[2]:]
    k = rope(cached['k'], pos)
    scores = cached_scores(rope(q, for_heads(own, q.shape[1])), k)
    if sinks == 0:
        return scores
    gap = (begins.squeeze(-1) - (sinks - 1)).clamp(min=1)       # from the last of the sinks
    own = nearer(own, gap, positions)
    to_sinks = cached_scores(rope(q, for_heads(own, q.shape[1])), k)
    return torch.where((pos < sinks)[:, :, None, None], to_sinks, scores)


def by_worth(q, k, v, cached, t, policy, cache, sinks, spill, rotate):
    """`bounded` for steps with a full cache. All scores are one product, and so are all outputs. In between,
    step by step: the weights of what is still there, and who goes."""
    def weights(i):
        return scores[:, :, :, i].masked_fill(~there[:, :, None], NEVER).softmax(-1).sum(2)
    T = q.shape[2]
    cached = append(cached, k, v, t)
    pos = cached['pos']
    B, G, _ = pos.shape
    scores = cached_scores(q, cached['k']).to(cached['total'].dtype)
    there = (pos < t).expand_as(pos).clone()            # (B, G, cache + T)
    seen = there.new_empty(B, G, T, cache + T)
    gone = pos.new_empty(B, G, T)
    total = cached['total']
    for i in range(T):
        there[:, :, cache + i] = True
        seen[:, :, i] = there
        a = weights(i)
        worth = POLICIES[policy](a, total + a, pos, cached['v'], t + i, cache, sinks)
        worth = worth.nan_to_num(0)                     # NaN evicts, too
        worth = worth.masked_fill(~there, math.inf)
        worst = worth == worth.amin(-1, keepdim=True)
        gone[:, :, i:i + 1] = torch.where(worst, pos, t + T).argmin(-1, keepdim=True)       # the oldest
        there.scatter_(2, gone[:, :, i:i + 1], False)
        if spill:                                       # the first weights only said who goes
            seen[:, :, i] = there
            a = weights(i)
        total = total + a
    o, _, log_mass = attend_cached(q, cached, seen, scores=scores)
    cached['total'] = total
    kept = there.nonzero()[:, 2].view(B, G, cache)
    return o, log_mass, pick(cached, gone), pick(cached, kept)


def longer(x, new):
    """As the definition, for one step after another. To copy a long cache takes longer than to read it. So
    without gradients the result is the beginning of a buffer with room for an eighth more, and later steps
    are written behind it. x itself stays as it is: if another text has gone on from x, its room is taken, and
    x is copied."""
    alike = x.shape[:2] == new.shape[:2] and x.dtype == new.dtype       # cat refuses others, or takes a type
    if torch.is_grad_enabled() or not alike:
        return copied(x, new)
    B, G, T0, d = x.shape
    T = T0 + new.shape[2]
    room = getattr(x, 'room', None)                         # (B, G, n, d), of which `used` steps are taken
    writable = room is not None and (torch.is_inference_mode_enabled() or not room.is_inference())
    if not (writable and room.used == T0 and T <= room.shape[2]):
        room = x.new_empty(B, G, T + T // 8 + 64, d)
        room[:, :, :T0] = x
    room.used = T
    room[:, :, T0:T] = new
    longer_x = room[:, :, :T]
    longer_x.room = room
    return longer_x

