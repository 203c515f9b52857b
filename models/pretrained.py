"""The layers of pretrained models, Llama to Qwen3.5 and Olmo Hybrid, and those of the rules' own papers.

    Pretrained(PretrainedConfig(rule='softmax', rms=True, act='swiglu', n_kv_head=2, pos='rope'))

Built on the hybrid, since a pretrained model is what one converts. hub/families.py says which fields each
family has, --published which ones the paper of a rule has.
"""
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from caches import for_heads
from common.flags import flag, known
from fastweight import RULES
from memory import Cache
from model import ACTS, Block, Conv, by_head, rotated
from models.hybrid import Hybrid, HybridCache, HybridConfig, HybridMixer
from models.slots import Slotted

OUT_GATES = {'silu': F.silu, 'sigmoid': torch.sigmoid}


@dataclass
class PretrainedConfig(HybridConfig):
    """A HybridConfig with what other decoders have. The fields that are no flags come from a folder."""
    qkv_conv: int = flag(0, 'width of a convolution with silu over q, k and v, after their projection; 0: '
                            'none', low=0, high=64, of='matrix')
    out_gate: str = flag('', 'what a matrix returns is multiplied by this function of x W, after out_norm',
                         ['', *OUT_GATES], of='matrix')
    qk_norm: bool = flag(False, 'RMSNorm of q and of k, of each head')
    head_dim: int = flag(0, 'channels of a head; 0: n_embd / n_head', low=0, high=2 ** 17)
    act: str = flag('relu2', '', ['relu2', 'gelu', 'swiglu'])
    rms: bool = False           # RMSNorm instead of LayerNorm
    eps: float = known(1e-5, 0, 1)
    theta: float = known(1e4, 1, 1e12)      # base of rope
    rope_scaling: list = ()     # for a scaled rope, see `speeds`
    rope_share: float = known(1.0, 0, 1)    # of the channels of a head, which rope rotates
    n_kv_head: int = known(0, 0, 1024)      # fewer heads for k and v than for q; 0: as many
    value_dim: int = known(0, 0, 2 ** 17)   # of v per head of a matrix; 0: head_dim
    value_heads: int = known(0, 0, 1024)    # see `has_own_heads`; 0: as in layers of softmax
    key_heads: int = known(0, 0, 1024)      # of q and k of a matrix; 0: as many as of v
    skip: bool = known(False, of='matrix')    # D v is added to what a matrix returns (Mamba-2)
    out_eps: float = known(0.0, 0, 1)       # out_norm is RMSNorm with this eps; 0: LayerNorm
    cache_gate: str = flag('', '', ['', *OUT_GATES])        # as out_gate, where keys are kept
    norm_after: bool = False    # where keys are kept, norms end a branch, see `PretrainedBlock`
    qk_norm_all: bool = False   # qk_norm is over the channels of all heads together
    qkv_bias: bool = False      # biases of q, k and v, if there are no others
    n_inner: int = known(0, 0, 2 ** 20)     # width of the MLP; 0: 4 n_embd
    tied: bool = True           # weight tying: the output layer is the embedding

    def __post_init__(self):
        self.rope_scaling = [float(x) for x in self.rope_scaling]       # a list, as JSON has it
        super().__post_init__()

    def contradictions(self):
        yield from super().contradictions()
        scaling = self.rope_scaling
        yield scaling and (len(scaling) != 4 or min(scaling) <= 0 or scaling[1] >= scaling[2]), (
            f'rope_scaling={scaling}: expected factor, low, high, n, all above 0, low below high')

        rotated = self.width_of_head() * self.rope_share
        yield self.has_rope() and rotated % 2, (
            f'--head_dim={self.head_dim}: rope rotates pairs, so it takes an even number of channels of a '
            f'head, not {rotated:g}; or --pos=none')

    def width_of_head(self):
        return self.head_dim or super().width_of_head()

    def has_own_heads(self, rule):
        """Whether layers with this rule have heads of their own number (Qwen3.5). They then have neither rope
        nor a norm of q and k, which are for the layers of softmax."""
        return RULES[rule].matrix and self.value_heads > 0

    def uses_rope(self, rule):
        return super().uses_rope(rule) and not self.has_own_heads(rule)

    def heads(self, rule):
        """The heads of q, of k and of v in a layer with this rule"""
        n_kv = self.n_kv_head or self.n_head
        if RULES[rule].matrix and (self.value_heads or self.key_heads):
            n_value = self.value_heads or self.n_head
            n_key = self.key_heads or n_value
            return n_key, n_key, n_value
        return self.n_head, n_kv, n_kv

    def channels(self, rule):
        V = self.width_of_head()
        if not RULES[rule].matrix:
            return V, V
        V = self.value_dim or V
        return self.key_dim or V, V

    def has_qkv_bias(self):
        return self.bias or self.qkv_bias

    def width_of_mlp(self):
        return self.n_inner or super().width_of_mlp()

    def layer_norm(self):
        if self.rms:
            return nn.RMSNorm(self.n_embd, self.eps)
        return nn.LayerNorm(self.n_embd, self.eps, bias=self.bias)


PUBLISHED = {       # what the layers of a paper have beside the rule: fields of PretrainedConfig
    'delta': {'qkv_conv': 4, 'phi': 'identity', 'beta_max': 1.0},
    'retention': {'out_gate': 'silu', 'pos': 'rope'},
    'gla': {'out_gate': 'silu', 'gate_rank': 16},
    'mamba2': {'qkv_conv': 4, 'phi': 'identity', 'out_gate': 'silu', 'key_heads': 1, 'skip': True},
    'gated_delta': {'qkv_conv': 4, 'phi': 'identity', 'beta_max': 1.0, 'out_gate': 'silu'},
    'kda': {'qkv_conv': 4, 'phi': 'identity', 'beta_max': 1.0, 'out_gate': 'sigmoid', 'gate_rank': 16}}


def speeds(half, theta, scaling, device):
    """The angle by which rope rotates pair i per step: w_i = theta^(-i / half) -> (half,), fp32. Llama 3.1
    scales it, so that a model trained on n positions can read more. scaling is (factor, low, high, n): a pair
    with more than `high` turns in n steps keeps its w, one with fewer than `low` gets w / factor. The pairs
    between get a weighted mean of both."""
    w = theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    if scaling:
        factor, low, high, n = scaling
        turns = n * w / (2 * math.pi)
        s = ((turns - low) / (high - low)).clamp(0, 1)
        w = (1 - s) * w / factor + s * w
    return w


def scaled_rope(x, pos, theta, scaling, share):
    """model.rope with another base, `speeds`, and for the first channels alone: a share of them"""
    half = int(share * x.shape[-1]) // 2
    return rotated(x, pos, speeds(half, theta, scaling, pos.device))


def swiglu(x):
    """silu(a) b, x = [a, b]. Shazeer 2020, arXiv:2002.05202"""
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


ACTS['swiglu'] = swiglu


class Skip(Slotted):
    """Fast weights that also return D v, D a number per head, at first 1 (Mamba-2)"""
    def __init__(self, rule, n_embd, n_head, *args):
        super().__init__(rule, n_embd, n_head, *args)
        self.skip = nn.Parameter(torch.ones(n_head, 1, 1))

    def forward(self, x, q, k, v, state=None, t=0):
        o, state = super().forward(x, q, k, v, state, t)
        return o + (self.skip * v).to(o.dtype), state


class PretrainedMixer(HybridMixer):
    """A Mixer whose heads may share keys and values, with norms and a convolution of q, k and v, and a gate.
    Its sizes are those that the Config says for this rule, see PretrainedConfig.heads and channels."""
    n = 1           # keys and values per token: models/writes.py has more

    def widths(self, c, rule):
        n_query, n_key, self.n_value = c.heads(rule)
        return [n_query * self.key_dim, n_key * self.key_dim, self.n_value * self.head_dim]

    def add_memory(self, c, rule):
        matrix = RULES[rule].matrix
        n_query, n_key, n_value = c.heads(rule)
        self.rotate = partial(scaled_rope, theta=c.theta, scaling=c.rope_scaling, share=c.rope_share)
        self.conv = Conv(sum(self.sizes), c.qkv_conv) if c.qkv_conv and matrix else None
        self.q_norm = self.k_norm = None
        if c.qk_norm and not c.has_own_heads(rule):
            self.q_norm = nn.RMSNorm(self.key_dim * (n_query if c.qk_norm_all else 1), c.eps)
            self.k_norm = nn.RMSNorm(self.key_dim * (n_key if c.qk_norm_all else 1), c.eps)
        super().add_memory(c, rule)
        if self.out_norm is not None and c.out_eps:
            self.out_norm = nn.RMSNorm(self.head_dim, c.out_eps)
        gate = c.out_gate if matrix else c.cache_gate
        self.act = OUT_GATES.get(gate)
        self.width = max(n_query, n_value) * self.head_dim
        self.gate = nn.Linear(c.n_embd, self.width, bias=False) if gate else None

    def memory_of(self, c, rule):
        n_query, n_key, n_value = c.heads(rule)
        if RULES[rule].bounded:
            self.rope = self.rope and c.positions == 'true'     # else the cache rotates the keys
            return HybridCache(rule, c.n_embd, n_query, n_key, self.head_dim, self.rotate, c)
        if not RULES[rule].matrix:
            return Cache(rule)
        memory = Skip if c.skip else Slotted
        return memory(rule, c.n_embd, n_value, self.head_dim, c.phi, c.norm, c.beta_max, c.gate_rank,
                      self.key_dim)

    def project(self, x, t=0, state=None):
        """x (B, T, n_embd), t the position of the first step -> q (B, H, T, key_dim), k (B, G, T, key_dim),
        v (B, G, T, head_dim), n of k and v side by side. With more heads of values than of keys, q and k are
        repeated for them.
        state: a dict; with --qkv_conv, the inputs before x in it are replaced by the last ones of x"""
        state = {} if state is None else state
        y = self.qkv(x)
        if self.conv is not None:
            y, state['last'] = self.conv(y, state.get('last'))
            y = F.silu(y)
        q, k, v = y.split(self.sizes, -1)
        if self.q_norm is not None:
            q = self.q_norm(q.unflatten(-1, (-1, len(self.q_norm.weight)))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, len(self.k_norm.weight)))).flatten(-2)
        q, k = self.placed(by_head(q, self.key_dim), by_head(k, self.n * self.key_dim), t)
        if k.shape[1] < self.n_value:
            q = for_heads(q, self.n_value)
            k = for_heads(k, self.n_value)
        return q, k, by_head(v, self.n * self.head_dim)

    def forward(self, x, state=None, t=0):
        """As Mixer. With a convolution, `last` in the state has the last inputs of that."""
        state = {**(state or {})}
        q, k, v = self.project(x, t, state)
        last = state.pop('last', None)
        o, new = self.memory(x, q, k, v, state or None, t)
        if self.conv is not None:
            new['last'] = last
        o = self.merge(o)
        if self.gate is not None:
            o = o * self.act(self.gate(x))
        return self.dropout(self.proj(o)), new


class PretrainedBlock(Block):
    """As Block, with other norms and MLPs. With norm_after (Olmo Hybrid), a layer that keeps keys is
    x + norm(mixer(x)), then x + norm(MLP(x))."""
    mixer_class = PretrainedMixer

    def __init__(self, c, rule):
        super().__init__(c, rule)
        self.norm_after = c.norm_after and not RULES[rule].matrix

    def add_mlp(self, c):
        width = c.width_of_mlp()
        self.act = ACTS[c.act]
        self.up = nn.Linear(c.n_embd, 2 * width if c.act == 'swiglu' else width, bias=c.bias)
        self.down = nn.Linear(width, c.n_embd, bias=c.bias)

    def forward(self, x, state=None, t=0):
        if not self.norm_after:
            return super().forward(x, state, t)
        state = {**(state or {})}
        x = x + self.norm1(self.mix(x, state, t))
        x = x + self.norm2(self.mlp(x, state))
        return x, state


class Pretrained(Hybrid):
    config_class = PretrainedConfig
    block_class = PretrainedBlock

    def add_output(self, c):
        super().add_output(c)
        self.head = None
        if not c.tied:
            self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
            nn.init.ones_(self.norm.weight)

    def first_std(self, name, n):
        if name.endswith('mixer.gate.weight'):
            return n ** -0.5
        return super().first_std(name, n)

    def logits(self, x):
        return F.linear(x, (self.head or self.embed).weight)


def as_published(given, rules):
    """The flags of a Config with these rules and, where it does not give them, those of the rule's paper,
    with RMSNorm for each norm. ValueError if no paper is known, or several are."""
    rules = {rule for rule in rules if RULES[rule].matrix}
    if len(rules) != 1 or not rules <= PUBLISHED.keys():
        raise ValueError(f'--published with {", ".join(rules)}: take one of {", ".join(PUBLISHED)}, maybe '
                         'with softmax')
    return {'conv': 0, 'rms': True, 'out_eps': 1e-5, **PUBLISHED[rules.pop()], **given}
