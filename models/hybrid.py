"""A matrix beside a cache: what the cache evicts is written into fast weights. And positions brought nearer.

    Hybrid(HybridConfig(rule='sink', cache=64, overflow='sum:slots'))
    Hybrid(HybridConfig(rule='sum', phi='slots'))                       # or slots alone

As in LoLCATs for the window (Zhang 2024, arXiv:2410.10254). Any policy can run a trained one. --positions
shortens the gaps that evicted tokens leave, for texts longer than the model knows (Oren 2024, appendix).
"""
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import caches
from caches import GAPS
from common.flags import flag
from fastweight import RULES, rules_that, without_autocast
from memory import Cache, wide
from model import GPT, Block, Config, Mixer
from models.slots import Slots, Slotted


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
        values = torch.cat([v, ones], -1)
        o, S = self.recurrence(self.normaliser(q), self.normaliser(k), values, **gates, S=state.get('S'))
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
        cached = {name: state[name] for name in ('k', 'v', 'pos', 'total') if name in state}
        with without_autocast(x):
            o, log_cache, went, new = self.attend_and_evict(q, k, v, cached or None, t)
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
        k = self.rope(went['k'], went['pos'])
        return self.rope(q, steps), {**went, 'k': k, 'bare': went['k']}

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

    def cannot_train(self, data, name, steps):
        """With --overflow, which token a policy evicts depends on weights, and no gradient says which it
        should."""
        yield from super().cannot_train(data, name, steps)
        chooses = self.config.keeps() - {'all', None, 'window', 'sink'}
        yield steps and self.config.overflow and chooses, (
            f'--rule={", ".join(chooses)} --overflow={self.config.overflow}: train with --rule=sink; the '
            'trained model runs with any policy, as sample.py --rule=tova')
