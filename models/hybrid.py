"""A matrix beside a cache: what the cache evicts is written into fast weights. And positions brought nearer.

    Hybrid(HybridConfig(rule='sink', cache=64, overflow='sum:slots'))
    Hybrid(HybridConfig(rule='sum', phi='slots'))                       # or slots alone

As in LoLCATs for the window (Zhang 2024, arXiv:2410.10254). Any policy can run a trained one. --positions
shortens the gaps that evicted tokens leave, for texts longer than the model knows (Oren 2024, appendix).
"""
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import caches
from caches import GAPS, for_heads
from common.flags import flag
from fastweight import FEATURE_MAPS, FLOOR, RULES, FeatureMap, number, rules_that, without_autocast
from memory import Cache, FastWeights, wide
from model import GPT, Block, Config, Mixer


@dataclass
class HybridConfig(Config):
    """A Config whose rules with a limited cache may have a matrix beside it"""
    overflow: str = flag('', 'evicted tokens go into a matrix of this rule and map: sum:slots, delta:taylor; '
                             'train it with window or sink, then any policy runs', of='bounded')
    positions: str = flag('true', 'of cached tokens; true: as they are; compress: long gaps are shortened, '
                                  'for texts longer than the model knows; log, sqrt: less so',
                          ['true', *GAPS], of='bounded')

    def contradictions(self):
        yield from super().contradictions()
        kept = self.keeps() - {'all', None}
        yield self.overflow and self.rule_beside() not in rules_that('matrix'), (
            f'--overflow={self.overflow}: choose from {", ".join(rules_that("matrix"))}')
        yield self.positions != 'true' and (not kept or self.pos not in ('auto', 'rope')), (
            f'--positions={self.positions} needs a bounded cache with rope')

    def rule_beside(self):
        """The rule of the matrix beside the cache; '' if there is none"""
        return self.overflow.partition(':')[0]

    def fewest_cached(self):
        return 0 if self.overflow else 1

    def uses(self, field):
        beside = self.rule_beside()
        if field.name == 'gate_rank' and beside and RULES[beside].gated:    # the matrix has such gates, too
            return True
        return super().uses(field)

    def sees_near_alone(self):
        return (self.positions != 'true' or super().sees_near_alone()) and not self.overflow

    def summary(self):
        return super().summary() + f' + {self.overflow}' * bool(self.overflow)


SHARPNESS = 0.3         # of slots, at first

class Slots(FeatureMap):
    """A key is written to those of m slots that it belongs to, softmax(W k + b). Their values add up in S. A
    query reads each slot by softmax's weight for its mean key c, e^(q.c / sqrt(d)), see Slotted.asked. So
    S is a cache of m tokens, each the mean of similar ones. m = 3d unless given. Each head learns its own W
    (H, m, d) and b. Peng 2022 (ABC, arXiv:2110.02488), Zhang 2024 (gated slot attention, 2409.07146)."""
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
        scores = total / for_heads(count, q.shape[1]).clamp(min=FLOOR) / math.sqrt(q.shape[-1])
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


class Overflow(Slotted):
    """Fast weights that take what a cache evicts, one token per step, with gates computed from its value."""
    def __init__(self, rule, n_head, head_dim, phi, gate_rank):
        super().__init__(rule, n_head * head_dim, n_head, head_dim, phi, gate_rank=gate_rank)

    def evicted_features(self, q, went, state):
        """What `write_evicted` computes with, one evicted token per step: features of q, features of its key,
        whether there is one (1 or 0), gates; the features' part of the new state"""
        k = went['k']
        if isinstance(self.phi, Slots):                     # the same content has one slot at any position
            k = went.get('bare', k)
        k = self.phi(wide(k), 'k')
        x = wide(went['v']).transpose(1, 2).flatten(2)          # the channels of all heads, like an input
        real = (went['pos'] >= 0).to(x.dtype)[..., None]
        gates = self.gates(x)
        gates['write'] = real * gates.get('write', 1)
        q, more = self.asked(q, went['k'], {'k': k, **gates}, state)
        return q, k, real, gates, more

    def write_evicted(self, q, went, state):
        """Write the tokens that the cache beside this matrix evicts (see caches.bounded), and read. The
        mass of the keys is what would be read if all values were 1.
        -> o (B, H, T, d), mass of the keys (B, H, T, 1), or per value channel; dict: S and n, or S with n as
        its last rows, with slots M"""
        self.redraw(state)
        v = went['v']
        q, k, real, gates, more = self.evicted_features(q, went, state)
        if self.rule.erases:
            o, mass, new = self.as_it_is(q, k, v, real, gates, state)
        else:
            o, mass, new = self.as_mean(q, k, v, gates, state)
        return o, mass, {**new, **more}

    def as_it_is(self, q, k, v, real, gates, state):
        """For `write_evicted`, with a rule that erases: S is read as it is, and n, which nothing erases from,
        sums the keys."""
        o, S = self.recurrence(self.normaliser(q), self.normaliser(k), v, **gates, S=state.get('S'))
        ones = torch.ones_like(v[..., :1])
        mass, n = self.recurrence(q, k, ones, write=real, log_f=gates.get('log_f'), S=state.get('n'))
        return wide(o), wide(mass), {'S': S, 'n': n}

    def as_mean(self, q, k, v, gates, state):
        """For `write_evicted`, with the other rules: a mean of the values, o divided by the mass. Ones are
        further value channels, so that one recurrence computes both: n is the last rows of S, the mass the
        last channels of its output."""
        ones = torch.ones_like(v[..., :1])
        if self.rule.z or self.rule.write == 'channel':         # each value channel has its own mass
            ones = torch.ones_like(v)
            for name in ('write', 'log_z'):
                if name in gates and gates[name].shape[-1] > 1:
                    gates[name] = torch.cat([gates[name], gates[name]], -1)
        o, S = self.recurrence(self.normaliser(q), self.normaliser(k), torch.cat([v, ones], -1), **gates,
                               S=state.get('S'))
        total, mass = wide(o).split([v.shape[-1], ones.shape[-1]], -1)
        return total / mass.clamp(min=1e-30), mass, {'S': S}


class HybridCache(Cache):
    """A Cache with fast weights beside it, which take what it evicts. Both share one denominator:
    o = (sum e^s v + m o') / (sum e^s + m). The sums are over the cache. o' is the output of the fast weights
    and m the mass of their keys, times a learned factor e^(x W + b). The state has theirs, too.

    n_head: H   n_kv: G   rope(x, pos): for positions that are not true   c: a HybridConfig"""
    def __init__(self, rule, n_embd, n_head, n_kv, head_dim, rope, c):
        super().__init__(rule, c.cache, c.sinks)
        self.rope = rope
        self.rotate = None
        if c.positions != 'true':
            self.rotate = partial(caches.rotate_nearer, rope=rope, positions=c.positions)
        self.overflow = None
        if c.overflow:
            self.overflow = matrix_beside(c.overflow, n_kv, head_dim, c.gate_rank)
            self.log_mass = nn.Linear(n_embd, n_head)   # scales of map and q may not fit exp's
            nn.init.zeros_(self.log_mass.weight)
            nn.init.zeros_(self.log_mass.bias)

    def attend_and_evict(self, q, k, v, cached=None, t=0):
        return self.forms.bounded(q, k, v, cached, t, self.rule.keeps, self.cache, self.sinks,
                                  self.overflow is not None, self.rotate)

    def forward(self, x, q, k, v, state=None, t=0):
        state = state or {}
        cached = {name: state[name] for name in ('k', 'v', 'pos', 'total') if name in state} or None
        with without_autocast(x):
            o, log_cache, went, new = self.attend_and_evict(q, k, v, cached, t)
            if self.overflow is None:
                return o, new
            o_matrix, mass, matrix = self.overflow.write_evicted(*self.at_true_positions(q, went, t), state)
            share = self.cache_share(x, log_cache, mass)
            o = torch.lerp(o_matrix, o.to(o_matrix.dtype), share)
            return o.to(v.dtype), {**new, **matrix}

    def at_true_positions(self, q, went, t=0):
        """Queries and evicted tokens for the matrix. Its keys have the rope of their true positions, whatever
        the cache has. `bare` are those without rope."""
        if self.rotate is None:
            return q, went
        steps = t + torch.arange(q.shape[2], device=q.device)
        return self.rope(q, steps), {**went, 'k': self.rope(went['k'], went['pos']), 'bare': went['k']}

    def cache_share(self, x, log_cache, mass):
        """How much of the output comes from the cache, (B, H, T, 1), or per value channel; the rest comes
        from the matrix. log_cache: log of the cache's denominator   mass: the matrix's, see `write_evicted`
        """
        log_matrix = mass.clamp(min=1e-30).log() + self.log_mass(x).mT[..., None]
        return (log_cache - log_matrix).sigmoid()


def matrix_beside(overflow, n_head, head_dim, gate_rank):
    """'sum:slots' -> such fast weights"""
    name, _, spec = overflow.partition(':')
    try:
        matrix = Overflow(name, n_head, head_dim, spec or 'favor', gate_rank)
    except ValueError as e:
        raise ValueError(f'--overflow={overflow}: {e}') from None
    if not matrix.phi.like_softmax:
        raise ValueError(f'--overflow={overflow}: cache and matrix share a denominator, so the map '
                         'must stand for exp(q.k / sqrt(d)), as favor, hedgehog and taylor do')
    return matrix


class HybridMixer(Mixer):
    def memory_of(self, c, rule):
        if RULES[rule].bounded:
            self.rope = self.rope and c.positions == 'true'     # else the cache rotates the keys
            return HybridCache(rule, c.n_embd, c.n_head, c.n_head, self.head_dim, self.rotate, c)
        if RULES[rule].matrix:
            return Slotted(rule, c.n_embd, c.n_head, self.head_dim, c.phi, c.norm, c.beta_max, c.gate_rank,
                           self.key_dim)
        return super().memory_of(c, rule)


class HybridBlock(Block):
    mixer_class = HybridMixer


class Hybrid(GPT):
    config_class = HybridConfig
    block_class = HybridBlock

    def cannot_train(self, data, steps):
        """With --overflow, which token a policy evicts depends on weights, and no gradient says which it
        should."""
        yield from super().cannot_train(data, steps)
        chooses = self.config.keeps() - {'all', None, 'window', 'sink'}
        yield steps and self.config.overflow and chooses, (
            f'--rule={", ".join(chooses)} --overflow={self.config.overflow}: train with --rule=sink; the '
            'trained model runs with any policy, as sample.py --rule=tova')
