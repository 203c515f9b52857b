"""What a layer remembers: `FastWeights`, a matrix with its map and its gates, or `Cache`, keys and values.

Both are modules with the same call, forward(x, q, k, v, state, t) -> o, the new state. fastweight.py and
caches.py define what they compute. A `Forms` says in which form it runs: the definition, or a faster one.
"""
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import caches
import fastweight
from common.checks import mistakes_together
from common.flags import refuse
from fastweight import LOG_MIN, NORMALISERS, RULES, feature_map, without_autocast


# ---- which form of the recurrence runs ---------------------------------------------------------------------
def shifted_sum(x, w):
    """y_t = sum_j w_j x_{t-n+j}, j = 0..n, per channel, with zeros before x. x (B, T, D), w (n + 1, D) -> y
    (B, T, D). fast.convolution.shifted_sum computes the same with a hand-written backward."""
    padded = F.pad(x, (0, 0, len(w) - 1, 0))
    return (padded.unfold(1, len(w), 1) * w.T).sum(-1)


class Forms(NamedTuple):
    """The functions that a model computes with. The defaults are plain torch; kernels.py and fast/ have
    faster ones."""
    recurrence: Callable = fastweight.chunked
    bounded: Callable = caches.bounded
    longer: Callable = caches.longer
    shift: Callable = shifted_sum
    why: str = 'chunk (plain torch and autograd)'       # one line to print: which forms are used, and why


PLAIN = Forms()         # for a module on its own; GPT.use sets others


def pick_forms(impl='auto'):
    """'loop', 'chunk', 'fused' or 'auto' -> Forms: plain ones or, if they are there, those of kernels.py,
    which then picks Triton or not, and of the room fast/. Without kernels.py or without fast/ all are plain:
    you may delete either, or both. Besides bench.py and the tests only this function imports them."""
    if impl == 'loop':
        return Forms(fastweight.recurrent, why='loop (fastweight.recurrent, the definition, slow)')
    if impl == 'chunk':
        return PLAIN
    try:
        import fast.caches
        import fast.convolution
        import kernels
    except ModuleNotFoundError:
        return PLAIN
    return Forms(kernels.chunked, fast.caches.bounded, fast.caches.longer, fast.convolution.shifted_sum,
                 'fused (kernels.py: batched products, on a GPU Triton)')


# ---- gates -------------------------------------------------------------------------------------------------
def start_bias(n_head, n, rate):
    """Biases b (n_head, 1, n) with exp(-rate softplus(b)) = 1 - 1/tau, for memory lengths tau of 4 to 512
    steps. We do not know which distances matter, so we cover them all: tau is spaced evenly in log over the n
    channels or, if n = 1, over the heads."""
    count = n if n > 1 else n_head
    tau = torch.tensor([45.0])                      # a single one gets the middle
    if count > 1:
        tau = torch.logspace(math.log10(4), math.log10(512), count)
    return bias_of(tau, rate).view(-1, 1, n).expand(n_head, 1, n).clone()


def bias_of(tau, rate):
    """The bias b for a memory of tau > 1 steps: exp(-rate softplus(b)) = 1 - 1/tau."""
    softplus_b = -(1 - 1 / tau).log() / rate
    return softplus_b.expm1().log()                 # softplus(b) = log(1 + e^b)


def wide(x):
    """x in fp32; fp64 stays. Made contiguous: the gradient of silu is slow for transposed heads."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


class Gates(nn.Module):
    """x (B, T, n_embd) -> dict of the gates that the rule has, for `recurrent` and its other forms. In fp32:
    write (B, H, T, V|1)   erase, log_f (B, H, T, K|1)   log_z (B, H, T, V)

    beta = beta_max sigmoid(x W)   log f = -rate softplus(x W + b)   log z likewise

    A log-decay per channel is at least LOG_MIN: the chunked forms need that bound, and all forms of a layer
    must agree. One per head has no bound. b starts so that f is 1 - 1/tau where x W = 0: a memory of about
    tau steps, see `start_bias`. Delta multiplies S by I - beta k k^T. With beta up to 2 it can have the
    eigenvalue -1, so a state can alternate (Grazzi 2024, arXiv:2411.12537). W is full, as in Mao 2022, or a
    product of two matrices of a given rank, as in GLA and KDA."""
    def __init__(self, rule, n_embd, n_head, K, V, beta_max, rank=0):
        super().__init__()
        self.rule = rule
        self.n_head = n_head
        self.beta_max = beta_max
        self.sizes = self.widths(K, V)
        self.narrow = nn.Linear(n_embd, rank, bias=False) if rank and any(self.sizes) else None
        if any(self.sizes):
            self.proj = nn.Linear(rank or n_embd, n_head * sum(self.sizes), bias=False)
        rate = rule.rate or 1.0
        if rule.rate is None:       # Mamba-2's A = exp(log_rate), at first 1
            self.log_rate = nn.Parameter(torch.zeros(n_head, 1, 1))
        if rule.f == 'fixed':       # RetNet: 1 - 2^-5, 1 - 2^-6, ...
            fixed = torch.log1p(-2.0 ** (-5 - torch.arange(n_head)))
            self.register_buffer('log_fixed', fixed[:, None, None], persistent=False)
        _, _, n_f, n_z = self.sizes
        if n_f:
            self.bias_f = nn.Parameter(start_bias(n_head, n_f, rate))
        if n_z:
            self.bias_z = nn.Parameter(start_bias(n_head, n_z, rate))

    def widths(self, K, V):
        """How many numbers of a head are computed from x, for w, e, f and z"""
        rule = self.rule
        return [{None: 0, '1-f': 0, 'dt': 0, 'beta': 1, 'channel': V}[rule.write],
                {None: 0, 'write': 0, 'channel': K}[rule.erase],
                {None: 0, 'fixed': 0, 'head': 1, 'channel': K}[rule.f],
                {None: 0, 'channel': V}[rule.z]]

    def forward(self, x):
        B, T, _ = x.shape
        rule = self.rule
        gates = {}
        if any(self.sizes):
            if self.narrow is not None:
                x = self.narrow(x)
            y = self.proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
            w, e, f, z = wide(y).split(self.sizes, -1)
        # forget: f along the keys, z along the values
        rate = rule.rate
        if rate is None:
            rate = self.log_rate.exp()
        if rule.f == 'fixed':
            gates['log_f'] = self.log_fixed.expand(B, -1, T, 1)
        elif rule.f:
            gates['log_f'] = -rate * F.softplus(f + self.bias_f)
        if rule.z:
            gates['log_z'] = (-rate * F.softplus(z + self.bias_z)).clamp(min=LOG_MIN)
        if rule.f == 'channel':
            gates['log_f'] = gates['log_f'].clamp(min=LOG_MIN)
        # how strongly to write
        if rule.write == '1-f':
            gates['write'] = -torch.expm1(gates['log_f'])
        elif rule.write == 'dt':
            gates['write'] = -gates['log_f'] / rate
        elif rule.write:
            gates['write'] = self.beta(w)
        # and to erase
        if rule.erase == 'write':
            gates['erase'] = gates['write']
        elif rule.erase:
            gates['erase'] = self.beta(e)
        return gates

    def beta(self, y):
        return self.beta_max * y.sigmoid()


# ---- a matrix ----------------------------------------------------------------------------------------------
class FastWeights(nn.Module):
    """The heart of a layer with a matrix: what is written, what is asked, and a form of the recurrence
    between them.

    forward(x, q, k, v, state, t):
    x (B, T, n_embd)   q, k (B, H, T, key_dim)   v (B, H, T, head_dim)
    state   None at a fresh start, or the dict that the last call returned
    t       position of the first step, an int or a tensor (only cosformer needs it)
    ->  o (B, H, T, head_dim), dict: S (B, H, V, K), with n as last row for norm 'attn'

    phi, norm '': the rule's own   key_dim 0: head_dim. ValueError for what does not go together."""
    forms = PLAIN
    gates_class = Gates         # models/writes.py has others

    def __init__(self, rule, n_embd, n_head, head_dim, phi='', norm='', beta_max=1.0, gate_rank=0, key_dim=0):
        super().__init__()
        self.rule = RULES[rule]
        self.norm = norm or self.rule.norm
        self.spec = phi or self.rule.phi
        self.phi = feature_map(self.spec, n_head, key_dim or head_dim)
        refuse(self.mistakes(rule))
        self.gates = self.gates_class(self.rule, n_embd, n_head, self.phi.feature_dim, head_dim, beta_max,
                                      gate_rank)
        self.normalise = self.norm == 'attn'
        self.normaliser = NORMALISERS[self.norm]

    def mistakes(self, rule):
        """For `refuse`. models/ablation.py goes together otherwise."""
        return mistakes_together(rule, self.phi, self.norm)

    def to_write(self, x, k, v, t=0):
        """What the recurrence needs of the text that is written -> dict of k (B, H, T, K), v and the gates"""
        features = self.phi(wide(k), 'k', t)
        return {'k': self.normaliser(features), 'v': v, **self.gates(x)}

    def to_read(self, q, t=0):
        """q (B, H, T, key_dim) -> the queries that read S, (B, H, T, K)"""
        features = self.phi(wide(q), 'q', t)
        return self.normaliser(features)

    def recurrence(self, q, k, v, **gates):
        """The equation, see fastweight.recurrent. Shared keys, and several writes, override it."""
        return self.forms.recurrence(q, k, v, **gates)

    def redraw(self, state):
        """Draw new random features for each training batch (Peng 2021, Choromanski 2021)."""
        if self.training and 'S' not in state and hasattr(self.phi, 'redraw'):
            self.phi.redraw()

    def forward(self, x, q, k, v, state=None, t=0):
        state = state or {}
        with without_autocast(x):                   # S and the gates are fp32
            self.redraw(state)
            written = self.to_write(x, k, v, t)
            o, S = self.recurrence(self.to_read(q, t), **written, S=state.get('S'), normalise=self.normalise,
                                   floor=self.phi.floor)
        return o, {'S': S}


# ---- a cache -----------------------------------------------------------------------------------------------
class Cache(nn.Module):
    """The heart of a layer that keeps keys and values: of all tokens (softmax), or of at most `cache`, by a
    policy that evicts the others. forward takes and returns the same as that of FastWeights, but the state is
    the cache: k, v and, if it is limited, pos, total (caches.bounded)."""
    forms = PLAIN

    def __init__(self, rule, cache=256, sinks=4):
        super().__init__()
        self.rule = RULES[rule]
        self.cache = cache
        self.sinks = sinks

    def attend_and_evict(self, q, k, v, cached=None, t=0):
        """caches.bounded with the settings of this layer"""
        return self.forms.bounded(q, k, v, cached, t, self.rule.keeps, self.cache, self.sinks)

    def forward(self, x, q, k, v, state=None, t=0):
        if self.rule.keeps == 'all':
            return caches.softmax(q, k, v, state, self.forms.longer)
        with without_autocast(x):
            o, _, _, state = self.attend_and_evict(q, k, v, state, t)
        return o, state
