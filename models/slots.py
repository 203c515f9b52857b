"""Fast weights as a hybrid has them: heads may share a matrix, and the map may be `slots`.

With slots a matrix is a cache of m tokens, each the mean of similar ones. A key is written to the slots that
it belongs to; a query reads each slot by softmax's weight for its mean key. So what a query reads with
depends on the keys so far, and the layer needs more than a map.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from caches import for_heads
from fastweight import FEATURE_MAPS, FLOOR, FeatureMap, number, without_autocast
from memory import FastWeights, wide

SHARPNESS = 0.3         # of slots, at first

class Slots(FeatureMap):
    """A key is written to those of m slots that it belongs to, softmax(W k + b). Their values add up in S. A
    query reads each slot by softmax's weight for its mean key c, e^(q.c / sqrt(d)), see Slotted.asked. m =
    3d unless given. Each head learns its own W (H, m, d) and b. Peng 2022 (ABC, arXiv:2110.02488), Zhang 2024
    (gated slot attention, 2409.07146)."""
    like_softmax = True

    def __init__(self, n_head, head_dim, m=None):
        m = number(m, 3 * head_dim)
        super().__init__(n_head, head_dim, feature_dim=m)
        self.weight = nn.Parameter(torch.randn(n_head, m, head_dim) / math.sqrt(head_dim))
        self.bias = nn.Parameter(torch.zeros(n_head, 1, m))

    def forward(self, x, side='q', t=0):
        if side == 'q':
            raise ValueError('--phi=slots: how a query reads depends on the keys so far, which '
                             'models/hybrid.py knows')
        return (x @ self.of_heads(self.weight, x).mT + self.of_heads(self.bias, x)).softmax(-1)

    @torch.no_grad()
    def begin(self, k):
        """Begin with clusters of the keys k (B, G, T, d), by k-means. The first token, which real models look
        at where nothing else matters, has a slot. W k + b is at first -SHARPNESS |k - c|^2 / (2 v), up to a
        constant; c is a centre, v the variance inside the clusters."""
        for head, keys in enumerate(k.transpose(0, 1).flatten(1, 2)):
            order = torch.randperm(len(keys) - 1, device=k.device) + 1
            c = keys[F.pad(order, (1, 0))[:self.feature_dim]]
            for _ in range(8):
                nearest = torch.cdist(keys, c).argmin(1)
                count = torch.bincount(nearest, minlength=len(c))[:, None]
                total = torch.zeros_like(c).index_add_(0, nearest, keys)
                c = torch.where(count > 0, total / count, c)
                c[0] = keys[0]
            v = (keys - c[nearest]).square().mean().clamp(min=1e-6)
            self.weight[head, :len(c)] = SHARPNESS * c / v
            self.bias[head, 0, :len(c)] = -SHARPNESS * c.square().sum(1) / (2 * v)

FEATURE_MAPS['slots'] = Slots


class Grouped(FastWeights):
    """Fast weights for heads that share keys and values: they share a matrix, its map and its gates, and
    H / G queries read each S. q (B, H, T, head_dim), k, v (B, G, T, head_dim). The forms of the recurrence
    know no groups, so we repeat what a group shares."""
    def recurrence(self, q, k, v, S=None, normalise=False, floor=FLOOR, **gates):
        H = q.shape[1]
        group = H // k.shape[1]
        shared = {'k': k, 'v': v, 'S': S, **gates}
        repeated = {name: x if x is None else for_heads(x, H) for name, x in shared.items()}
        o, S = self.forms.recurrence(q, **repeated, normalise=normalise, floor=floor)
        return o, S[:, ::group]


class Slotted(Grouped):
    """Fast weights whose map may be `slots`: then what a query reads with depends on the keys so far."""
    def __init__(self, rule, *args, **how):
        super().__init__(rule, *args, **how)
        if isinstance(self.phi, Slots) and (not self.normalise or self.rule.erases):
            raise ValueError(f'--phi=slots with --rule={rule} --norm={self.norm}: slots hold means; take '
                             '--rule=sum or gla-beta, or another that does not erase, with --norm=attn')

    def asked(self, q, k, written, state, t=0):
        """The features of q (B, H, T, head_dim), not yet normalised, (B, H, T, K), and their part of the new
        state. written: phi(k) as `k`, and the gates. With the map `slots` it is e^(q.c / sqrt(d)) for each
        slot: c, the mean of the keys k (B, G, T, head_dim) that have been written there, is read from fast
        weights M, whose keys are k and whose values are phi(k)."""
        q = wide(q)
        if not isinstance(self.phi, Slots):
            return self.phi(q, 'q', t), {}
        k = wide(k)
        features = written['k']
        decays = {'write': written.get('write'), 'log_z': written.get('log_f')}
        ones = torch.ones_like(k[..., :1])
        n = state['S'][:, :, -1:].mT if 'S' in state else None
        count, _ = self.recurrence(ones, ones, features, **decays, S=n)
        total, M = self.recurrence(q, k, features, **decays, S=state.get('M'))      # count times q.c
        count = for_heads(count, q.shape[1]).clamp(min=FLOOR)
        scores = total / count / math.sqrt(q.shape[-1])
        at_most_e40 = scores.clamp(max=40)      # sums of products of e^40 stay far below fp32's e^88
        return at_most_e40.exp(), {'M': M}

    def forward(self, x, q, k, v, state=None, t=0):
        state = state or {}
        with without_autocast(x):
            self.redraw(state)
            written = self.to_write(x, k, v, t)
            q, more = self.asked(q, k, written, state, t)
            o, S = self.recurrence(self.normaliser(q), **written, S=state.get('S'), normalise=self.normalise,
                                   floor=self.phi.floor)
        return o, {'S': S, **more}
