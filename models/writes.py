"""Several writes per token: DeltaProduct, Siems 2025 (arXiv:2502.10297).

    ManyWrites(ManyWritesConfig(rule='delta', writes=2))

n writes, one forget, one read per token: `recurrent` with n steps per token. A token has n keys and values.
"""
from dataclasses import dataclass

import torch.nn.functional as F

from common.flags import flag
from fastweight import RULES
from memory import Gates, wide
from models.pretrained import Pretrained, PretrainedBlock, PretrainedConfig, PretrainedMixer
from models.slots import Slotted


@dataclass
class ManyWritesConfig(PretrainedConfig):
    """A PretrainedConfig whose rules that erase write several times per token"""
    writes: int = flag(1, 'delta rules: writes per token (DeltaProduct)', low=1, high=16, of='erases')

    def contradictions(self):
        yield from super().contradictions()
        yield self.writes > 1 and self.pos == 'rope', (
            f'--writes={self.writes} with --pos=rope: a place has several keys; take another --pos')
        yield self.writes > 1 and (self.norm == 'attn' or self.phi.startswith('cosformer')), (
            f'--writes={self.writes}: leave out --norm=attn and --phi=cosformer, which count one key a token')


def each_write(x, n):
    """The n writes of a token, side by side (B, H, T, n d), become steps (B, H, n T, d)."""
    return x.unflatten(-1, (n, -1)).flatten(2, 3)


def spread(x, n, i):
    """x (B, H, T, d) has one entry per token. Put it at step i of the token's n steps (B, H, n T, d), with
    zeros at the others."""
    if n == 1:
        return x
    return F.pad(x[:, :, :, None], (0, 0, i, n - 1 - i)).flatten(2, 3)


class ManyGates(Gates):
    """Gates with n strengths of writing and erasing per token, of which only the first forgets"""
    def __init__(self, *args, n):
        self.n = n
        super().__init__(*args)

    def widths(self, K, V):
        n_w, n_e, n_f, n_z = super().widths(K, V)
        return [self.n * n_w, self.n * n_e, n_f, n_z]

    def beta(self, y):
        """y (B, H, T, n d) -> the beta of each write (B, H, n T, d)"""
        return super().beta(each_write(y, self.n))

    def forward(self, x):
        gates = super().forward(x)
        for name in {'log_f', 'log_z'} & gates.keys():
            gates[name] = spread(gates[name], self.n, 0)
        return gates


class ManyFastWeights(Slotted):
    """FastWeights whose keys and values, (B, G, T, n head_dim), are those of n writes side by side"""
    def __init__(self, *args, n, **how):
        self.n = n
        super().__init__(*args, **how)

    def gates_class(self, *args):
        return ManyGates(*args, n=self.n)

    def to_write(self, x, k, v, t=0):
        features = self.phi(each_write(wide(k), self.n), 'k', t)
        return {'k': self.normaliser(features), 'v': each_write(v, self.n), **self.gates(x)}

    def recurrence(self, q, k, v, **gates):
        last = self.n - 1                   # a token reads after its last write
        o, S = super().recurrence(spread(q, self.n, last), k, v, **gates)
        return o[:, :, last::self.n], S


class ManyMixer(PretrainedMixer):
    """A mixer with n keys and values per token, if its rule erases"""
    def widths(self, c, rule):
        if RULES[rule].erases:
            self.n = c.writes
        q, k, v = super().widths(c, rule)
        return [q, self.n * k, self.n * v]

    def memory_of(self, c, rule):
        if self.n == 1:
            return super().memory_of(c, rule)
        return ManyFastWeights(rule, c.n_embd, self.n_value, self.head_dim, c.phi, c.norm, c.beta_max,
                               c.gate_rank, self.key_dim, n=self.n)


class ManyBlock(PretrainedBlock):
    mixer_class = ManyMixer


class ManyWrites(Pretrained):
    config_class = ManyWritesConfig
    block_class = ManyBlock
