"""The delta rule with attention normalisation, an ablation of Schlag 2021 (arXiv:2102.11174).

    DividedByKeys(PretrainedConfig(rule='delta', phi='elu', norm='attn'))

What a key finds is divided by the sum of the weights with which it finds: by n_{t-1}.k_t where it erases, by
n_t.q_t where it reads. n is the plain sum of the keys, each normalised to sum 1. The delta rule erases, so n
is no row of S that the rule would keep: it is summed beside S.
"""
import torch

from caches import for_heads
from fastweight import FLOOR, NORMALISERS, RULES
from models.pretrained import Pretrained, PretrainedBlock, PretrainedMixer
from models.slots import Slotted


def seen_by_k(k, n):
    """n_{t-1}.k_t (B, H, T, 1), from keys k and the sums n of the keys up to t (B, H, T, K)"""
    return (k * (n - k)).sum(-1, keepdim=True)


class ByKeys(Slotted):
    """FastWeights for a rule that erases, divided by the sum of the keys. The state is S with n as its last
    row."""
    def __init__(self, *args):
        super().__init__(*args)
        self.normaliser = NORMALISERS['sum']

    def mistakes(self, rule):
        yield self.rule.write == 'channel', (
            f'--norm=attn with --rule={rule}: each value channel is apart and needs a denominator of its own')
        yield self.rule.f, (
            f'--norm=attn with --rule={rule}: erasing makes weights negative, so their sum n.q may be 0 or '
            'below; what delta divides by instead, the sum of keys, has no decay; use --norm=l2')
        yield not self.phi.mean, (
            '--norm=attn divides by n.q, which this map can make zero or negative: use a map >= 0, as '
            '--phi=elu, or --norm=l2')
        yield not self.phi.positive, (
            '--norm=attn divides by the sum of the features, here maybe zero or negative: use --norm=l2')

    def recurrence(self, q, k, v, write, erase, S, **how):
        n = k.cumsum(2)                                         # (B, G, T, K): the keys up to t
        if S is not None:
            n = n + S[:, :, -1:]
            S = S[:, :, :-1]
        seen_by_q = (q * for_heads(n, q.shape[1])).sum(-1, keepdim=True)
        erase = erase / seen_by_k(k, n).clamp(min=FLOOR)
        o, S = super().recurrence(q, k, v, write=write, erase=erase, S=S)
        o = o / seen_by_q.clamp(min=FLOOR)
        return o.to(v.dtype), torch.cat([S, n[:, :, -1:]], 2)


class ByKeysMixer(PretrainedMixer):
    def memory_of(self, c, rule):
        if not RULES[rule].erases:
            return super().memory_of(c, rule)
        return ByKeys(rule, c.n_embd, self.n_value, self.head_dim, c.phi, c.norm, c.beta_max, c.gate_rank,
                      self.key_dim)


class ByKeysBlock(PretrainedBlock):
    mixer_class = ByKeysMixer


class DividedByKeys(Pretrained):
    block_class = ByKeysBlock
