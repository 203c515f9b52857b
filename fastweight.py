"""Fast weights: the definition of every update rule and feature map of this project.

A network has slow weights, which training changes. It may also have fast weights, which it writes itself
while it reads a text (Schmidhuber 1991, 1992). Here each head keeps a matrix S of fast weights. At each step
the slow weights turn the token into a key (where to write), a value (what to write) and a query (where to
read). To write, the head adds v k^T to S. To read, it computes S q: after one write S k = v (k.k), which is v
if k has length 1. Here one head writes three times, and the third key is the same as the first. `recurrent`
takes q, k, v and returns what the queries read and the final S, which is printed:

>>> k = torch.tensor([[[[1., 0.], [0., 1.], [1., 0.]]]])
>>> v = torch.tensor([[[[1., 2.], [3., 4.], [5., 6.]]]])
>>> recurrent(k, k, v)[1]                                       # rule `sum`
tensor([[[[6., 3.],
          [8., 4.]]]])
>>> one = torch.ones(1, 1, 3)
>>> recurrent(k, k, v, write=one, erase=one)[1]                 # rule `delta`
tensor([[[[5., 3.],
          [6., 4.]]]])

The keys are (1, 0) and (0, 1), so each column of S is what one of them finds. The sum rule piles up: the
first key finds (6, 8), its two values added. The delta rule first subtracts what the key finds, so the first
key finds only its last value, (5, 6); exactly, as keys have length 1. The other key, at a right angle, is not
disturbed. All rules that keep a matrix are settings of one equation:

    D_t = (z_t f_t^T) * S_{t-1}                             forget   (* elementwise, z f^T an outer product)
    S_t = D_t + (w_t * v_t - D_t (e_t * k_t)) k_t^T         write, erase what the key already finds
    o_t = S_t q_t                                           read, after the write

D is S after forgetting. f and e have an entry per channel of the key, z and w per channel of the value. S
keeps its size however many steps are read, so a model of such layers is an RNN. This file has the equation
(`recurrent` is the definition, `chunked` computes the same with matrix products), the feature maps and
normalisers for q and k (`FEATURE_MAPS`, `NORMALISERS`), and the gates f, z, w, e of each known model
(`RULES`). The other kind of state, a cache of keys and values, is in caches.py; the layer around both in
memory.py and model.py. papers/__init__.py lists the papers.

name          shape           meaning                         the papers' letter
B H T         sizes           batch, heads, time steps
K V           sizes           channels of q, k; of v          d_dot, d_value (Schlag), k (Kasai), 2m (FAVOR+)
q k           (B, H, T, K)    query, key, after the map phi   phi(q), phi(k)
v             (B, H, T, V)    value
S             (B, H, V, K)    fast weights: the state         W (Schlag), S (Katharopoulos, Mao, Kasai)
n             (B, H, K)       last row of S if `normalise`    z (Katharopoulos, Schlag, Kasai)
log_f         (B, H, T, K|1)  log of f_t, <= 0: key channels  log of sigma(f_key) (Mao), g (Peng), alpha (GLA)
log_z         (B, H, T, V|1)  log of z_t: value channels      log sigma(f) (Mao)
write         (B, H, T, V|1)  w_t, along the values           beta (Schlag), 1 - g (Peng), w (GDN-2)
erase         (B, H, T, K|1)  e_t, along the keys             beta (Schlag), b (GDN-2)
o             (B, H, T, V)    output: what the query reads    y
K|1, V|1: one number per channel, or one per head. With one per head, write and erase may also be (B, H, T).
"""
import contextlib
import math
from functools import partial, wraps
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

LOG_MIN = -5.0  # smallest log-decay of a channel per step, in chunks: 0.7 % is left. See `DECAYING`
LOG_0 = -50.0   # smallest log-decay of a head, likewise: what is left, 2e-22, is 0 but for rounding
FLOOR = 1e-6    # smallest n.q to divide by; maps that can make it 0 or negative set 1e-2


def without_autocast(x):
    """A context for what must be fp32 even if the layers around it are bf16. A running sum in bf16 stops at
    256: the next number is 258, so 257 is rounded back to 256."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):       # usually; a context takes time
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)

def full_precision(f):
    """f, whose first argument is q or k, without autocast."""
    @wraps(f)
    def whole(*args, **given):
        x = args[0] if args else given['q' if 'q' in given else 'k']
        with without_autocast(x):
            return f(*args, **given)
    return whole

# ---- the equation ------------------------------------------------------------------------------------------
def outer(a, b):
    """a b^T. a (B, H, V)  b (B, H, K)  ->  (B, H, V, K)"""
    return a[..., :, None] * b[..., None, :]

def find(S, x):
    """S x: what the key or query x finds in S. S (B, H, V, K)  x (B, H, K)  ->  (B, H, V)"""
    return (S @ x[..., None]).squeeze(-1)

@full_precision
def recurrent(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR):
    """The definition: one step after the other, in O(T V K). Only S is passed on from step to step.

        D_t = (z_t f_t^T) * S_{t-1}    S_t = D_t + (w_t * v_t - D_t (e_t * k_t)) k_t^T    o_t = S_t q_t

    q, k (B, H, T, K)   v (B, H, T, V)   log_f, erase (B, H, T, K|1)   log_z, write (B, H, T, V|1)
    write, erase may be (B, H, T)   S (B, H, V, K), with `normalise` (B, H, V + 1, K)
    ->  o (B, H, T, V), last S (fp32; fp64 for fp64 inputs)
    A gate that is None has no effect: w = 1, e = 0, f = z = 1. S = None starts from 0.
    normalise: o_t is divided by max(n_t . q_t, floor). n is the sum of the keys, written and decayed like the
    values: one more row of S, for a value that is always 1. With features >= 0, o_t averages the values.
    Katharopoulos 2020 sec. 3.2. ValueError for normalise with erase, or with a vector write or log_z:
    `refuse_mean` says why.
    From Schlag 2021 sec. 4.2 (w = e = beta), Mao 2022 (f, z), Peng 2021 (f = g, w = 1-g), KDA (f, w = e),
    Gated DeltaNet-2 (f, w, e).

    If you change its results, test_recurrent_is_the_equation fails. train.py and sample.py run faster forms,
    so your change has no effect there without --impl=loop."""
    dtype = v.dtype
    q, k, v, w, e, log_f, log_z, S = filled(q, k, v, write, erase, log_f, log_z, S, normalise)
    f = log_f.exp()
    z = log_z.exp()
    o = []
    for t in range(q.shape[2]):
        q_t, k_t, v_t, w_t, e_t, f_t, z_t = (x[:, :, t] for x in (q, k, v, w, e, f, z))
        D = outer(z_t, f_t) * S                             # forget: a gate per head broadcasts
        S = D + outer(w_t * v_t - find(D, e_t * k_t), k_t)  # write, erase
        o.append(find(S, q_t))                              # read
    return finish(torch.stack(o, 2), normalise, floor, dtype), S

def refuse_mean(write, erase, log_z):
    """ValueError where o / (n.q), n the sum of the keys, would not be a weighted average of the values."""
    if erase is not None:
        raise ValueError('normalise with erase: erasing makes weights negative, so their sum n.q may be <= 0')
    vectors = {'write': write, 'log_z': log_z}
    for name, x in vectors.items():
        if x is not None and x.dim() == 4 and x.shape[-1] > 1:
            raise ValueError(f'normalise with a vector {name}: each value channel needs a denominator of its '
                             'own')

def start(q, k, v, write, erase, log_f, log_z, S, normalise, converts=True):
    """The first lines of all that computes the recurrence: convert to fp32 (fp64 stays), set S_0 = 0. Absent
    gates stay None. normalise appends a value channel that is always 1, so the last row of S is n. converts:
    if false, types stay.  ->  q, k, v; w, e, log_f, log_z (B, H, T, .); S"""
    if normalise:
        refuse_mean(write, erase, log_z)
        v = F.pad(v, (0, 1), value=1.0)
    if S is None:
        B, H, _, K = k.shape
        S = v.new_zeros(B, H, v.shape[-1], K)
    dtype = torch.promote_types(v.dtype, torch.float32)
    tensors = [q, k, v, write, erase, log_f, log_z, S]
    for i, x in enumerate(tensors):
        if x is None:
            continue
        if x.dim() == 3:
            x = x[..., None]
        if converts and x.dtype != dtype:
            x = x.to(dtype)
        tensors[i] = x
    return tensors

def filled(*given):
    """`start`, but each absent gate becomes a constant that changes nothing."""
    q, k, v, *gates, S = start(*given)
    for i, neutral in enumerate((1.0, 0.0, 0.0, 0.0)):
        if gates[i] is None:
            gates[i] = torch.full_like(v[..., :1], neutral)
    return q, k, v, *gates, S

def finish(o, normalise, floor, dtype):
    """Divide by max(n_t . q_t, floor). Dividing by n_t . q_t + floor would bias every output."""
    if normalise:
        n_q = o[..., -1:].clamp(min=floor)
        o = o[..., :-1] / n_q
    return o.to(dtype)


# ---- the same in matrix products ---------------------------------------------------------------------------
# A chunk is C steps that are computed together. Here Q, K, V are its queries, keys and values, one row per
# step (elsewhere K and V are sizes). S is the state before the chunk, S' the state after it.
#
# 1. sum (w = 1). Query t reads S and what steps 1..t of the chunk wrote. The weights q_t . k_s are a C x C
#    tile with row t and column s. The causal mask hides the future:
#
#           s = 1  2  3  4          O  = tril(Q K^T) V + Q S^T
#     t = 1     #  .  .  .          S' = S + V^T K
#         2     #  #  .  .
#         3     #  #  #  .          # is kept, . is masked
#         4     #  #  #  #
#
# 2. delta. S grows by u_t k_t^T at step t. What is added, u_t, is the value less what the key already finds,
#    in S and in the earlier u_s:
#        u_t = w_t v_t - S r_t - sum_{s<t} (r_t . k_s) u_s       r_t = e_t * k_t
#    Move the sum to the left. Row t of L has r_t . k_s at each s < t, so all steps together are
#        (I + L) U = w * V - r S^T       L = tril(r K^T, -1)     r = e * K
#    a linear system. Row t has only earlier u_s beside u_t, so U is solved from the first row to the last.
#    Then U takes V's place:
#        O = tril(Q K^T) U + Q S^T       S' = S + U^T K
# 3. one decay per head, f or z. Let a be the running sum of its log. What step s wrote has shrunk by
#    exp(a_t - a_s) when t reads it, and S by exp(a_t). The first is a number for each pair of steps, a tile:
#        h_ts = exp(a_t - a_s)                       A = tril(Q K^T) * h       L = tril(r K^T, -1) * h
#        (I + L) U = w * V - exp(a) (r S^T)          O = A U + exp(a) (Q S^T)
#        S' = exp(a_C) S + U^T (exp(a_C - a) K)
#    a never rises, so no exponent is above 0 where s <= t, and no decay is too fast.
# 4. one decay per channel. For the keys there would be a tile h for each channel. So we split exp(a_t - a_s)
#    into exp(a_t - m) for t and exp(m - a_s) for s, and multiply these vectors into the rows of Q and K. Any
#    m will do; the value of a at the middle step keeps both from overflowing. y reads, x is written, r looks
#    up what the key already finds:
#        y = exp(a - m) Q        x = exp(m - a) K        r = exp(a - m) (e * K)
#        A = tril(y x^T)         L = tril(r x^T, -1)     S_m = S exp(m), S decayed up to the middle step
#        (I + L) U = w * V - r S_m^T
#        O = A U + y S_m^T       S' = (S_m + U^T x) exp(a_C - m)
#    The values get the same kind of factors. Let c be the running sum of log z, and c_m its middle:
#        (I + L) U = exp(c_m - c) (w * V) - r S_m^T      O = exp(c - c_m) (A U + y S_m^T)
#    The rows of S_m get exp(c_m), those of S' get exp(c_C - c_m). The term r S_m^T needs no factor: what the
#    key finds is read with exp(c - c_m) and written with exp(c_m - c), and these cancel.
#
# Why at most 16 steps in a chunk whose channels decay here, but 32 in fast/chunks.py? A step is at most 8
# steps away from the middle. At -5 per step its factors stay within exp(+-40). If keys and values both decay,
# U^T x has a key's factor times a value's: up to exp(80), and fp32 ends at exp(88). fast/ brings both to the
# chunk's end, where they are at most 1, before it multiplies them, and its backward has no gradient of a
# factor. (With decay on one side only, 32 steps are safe here, too: what is inf above the diagonal is masked.
# In 64, a factor itself may be inf and its partner 0, and inf * 0 is NaN.) So a channel keeps at least e^-5
# per step, in layers, too (`Gates` in memory.py), as in GLM-5.3, Ling, flash-linear-attention's `safe_gate`.
DECAYING = 16

def head_and_channels(log_f, log_z):
    """Log-decays, or None  ->  log_h (B, H, T, 1), the sum of those that are one per head, at least LOG_0;
    log_f and log_z where they are per channel, at least LOG_MIN. None for what is absent."""
    log_h = None
    channels = []
    for x in (log_f, log_z):
        if x is not None and x.shape[-1] == 1:
            x = x.clamp(min=LOG_0)
            log_h = x if log_h is None else log_h + x
            x = None
        elif x is not None and (x.device.type != 'cpu' or x.amin() < LOG_MIN):
            x = x.clamp(min=LOG_MIN)                        # on a CPU, to look first is faster
        channels.append(x)
    return log_h, *channels

def pairs(log_h):
    """log_h (B, H, C, 1) of a chunk  ->  exp(a_t - a_s) for s <= t, else 1 (B, H, C, C); exp(a), exp(a_C - a)
    (B, H, C, 1); exp(a_C) (B, H, 1, 1). a is the running sum."""
    a = log_h.cumsum(2)
    end = a[:, :, -1:]
    past = (a - a.mT).tril_()                               # above the diagonal, exp would be inf
    return past.exp(), a.exp(), (end - a).exp(), end.exp()

def factors(log_decay):
    """log_decay (B, H, C, d) of a chunk  ->  exp(a - m), exp(m - a) of that shape; exp(m), exp(a_C - m)
    (B, H, 1, d). a is the running sum, m its value at the middle step."""
    a = log_decay.cumsum(2)
    m = a[:, :, a.shape[2] // 2, None].detach()             # it cancels in every result: no gradient
    return (a - m).exp(), (m - a).exp(), m.exp(), (a[:, :, -1:] - m).exp()

@full_precision
def chunked(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR,
            chunk=64):
    """`recurrent` in matrix products, chunk after chunk: same results, any T >= 1, except that a channel's
    log-decay counts as at least LOG_MIN = -5 per step, and has no gradient below. Then C <= 16, too.
    O(T (C (K + V) + K V)): short chunks need less arithmetic, long chunks make fewer and larger products.
    Letters as above and in fast/chunks.py."""
    dtype = v.dtype
    q, k, v, w, e, log_f, log_z, S = filled(q, k, v, write, erase, log_f, log_z, S, normalise)
    log_h, log_f, log_z = head_and_channels(log_f, log_z)
    if log_f is not None or log_z is not None:
        chunk = min(chunk, DECAYING)
    rows = [torch.zeros_like(v[..., :1]) if x is None else x for x in (q, k, v, w, e, log_h, log_f, log_z)]
    o = []
    for i in range(0, q.shape[2], chunk):
        steps = slice(i, i + chunk)
        Q, K, V, w_i, e_i, log_h_i, log_f_i, log_z_i = (x[:, :, steps] for x in rows)
        h_ts, h_in, h_out, h_all = pairs(log_h_i)           # exp(a_t - a_s), exp(a), exp(a_C - a), exp(a_C)
        f_up, f_down, f_in, f_out = factors(log_f_i)        # exp(a - m), exp(m - a), exp(m), exp(a_C - m)
        z_up, z_down, z_in, z_out = factors(log_z_i)
        y = Q * f_up
        x = K * f_down
        U = w_i * V * z_down
        S = S * f_in * z_in.mT                              # S_m
        if erase is not None:
            r = e_i * K * f_up
            L = (r @ x.mT).tril(-1) * h_ts
            right = U - h_in * (r @ S.mT)                   # of (I + L) U = right; unitriangular adds I
            U = torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
        A = (y @ x.mT).tril() * h_ts
        o.append(z_up * (A @ U + h_in * (y @ S.mT)))
        S = (S * h_all + U.mT @ (x * h_out)) * f_out * z_out.mT
    return finish(torch.cat(o, 2), normalise, floor, dtype), S


# ---- feature maps phi: (B, H, T, head_dim) -> (B, H, T, feature_dim) ---------------------------------------
class FeatureMap(nn.Module):
    """phi(x, side, t): x (B, H, T, head_dim), side 'q' or 'k', t the position of the first step. This class
    applies f to each entry; others override forward.
    positive      no feature is ever negative, so the normaliser `sum` may divide by their sum
    mean          phi(q).phi(k) >= 0 (random features: on average), so `attn` may divide by n.q
    floor         the smallest n.q to divide by
    like_softmax  phi(q).phi(k) approximates softmax's exp(q.k / sqrt(head_dim)), or is trained to
    max_len       the number of positions that the map knows; None: no limit"""
    positive, mean, floor, like_softmax, max_len = True, True, FLOOR, False, None

    def __init__(self, n_head, head_dim, arg=None, **traits):
        super().__init__()
        if arg is not None:
            raise ValueError(f'takes nothing after the colon, not {arg!r}')
        self.head_dim = self.feature_dim = head_dim
        for name, value in traits.items():
            setattr(self, name, value)

    def forward(self, x, side='q', t=0):
        return self.f(x)

    def of_heads(self, p, x):
        """A parameter p (G, ..) for each head of x (B, H, T, d): heads of q that share keys share its map."""
        return p.repeat_interleave(x.shape[1] // len(p), 0).to(x.dtype)

def number(arg, default):
    """The number after the colon of --phi=dpfp:3: positive, and an integer if the default is one."""
    if arg is None:
        return default
    kind = type(default)
    try:
        value = kind(arg)
    except ValueError:
        value = 0
    if not 0 < value <= 65536:
        expected = {int: 'a whole number', float: 'a number'}[kind]
        raise ValueError(f'expected {expected} above 0, at most 65,536')
    return value

class Exp(FeatureMap):
    """exp(s x), s = 1 unless given. Zhang 2024 sec. 3: with s = 2, but not 1, weights are peaked enough for
    recall."""
    def __init__(self, n_head, head_dim, s=None):
        super().__init__(n_head, head_dim, s=number(s, 1.0))

    def forward(self, x, side='q', t=0):
        return (self.s * x).exp()

class DPFP(FeatureMap):
    """r_i r_{i-j}, r = relu([x; -x]), i cyclic, j = 1..nu. nu = 1 unless given. Schlag 2021, listing 1;
    equation 37 has these products in another order.

    >>> DPFP(1, 2)(torch.tensor([1., -2.]))         # r = (1, 0, 0, 2), times its neighbours (2, 1, 0, 0)
    tensor([2., 0., 0., 0.])
    """
    floor = 1e-2

    def __init__(self, n_head, head_dim, nu=None):
        nu = number(nu, 1)
        super().__init__(n_head, head_dim, nu=nu, feature_dim=2 * head_dim * nu)
        if nu >= 2 * head_dim:
            raise ValueError(f'nu counts shifts of 2 x {head_dim} entries: 1..{2 * head_dim - 1}')

    def forward(self, x, side='q', t=0):
        r = torch.cat([x, -x], -1).relu()
        return torch.cat([r * r.roll(j, -1) for j in range(1, self.nu + 1)], -1)

class Taylor(FeatureMap):
    """[1, x / d^(1/4), x_i x_j / sqrt(d) (i < j), x_i^2 / sqrt(2d)]. phi(q).phi(k) = 1 + s + s^2/2 >= 1/2,
    s = q.k / sqrt(d): the Taylor series of softmax's e^s. Zhang 2024 sec. 3. Each pair i, j appears once, as
    in Arora 2024, so there are about d^2/2 features."""
    positive, like_softmax = False, True

    def __init__(self, n_head, head_dim, arg=None):
        super().__init__(n_head, head_dim, arg, feature_dim=(head_dim + 1) * (head_dim + 2) // 2)

    def forward(self, x, side='q', t=0):
        d = self.head_dim
        i, j = torch.tril_indices(d, d, device=x.device)
        c = torch.where(i == j, 0.5, 1.0).to(x.dtype).sqrt() / math.sqrt(d)
        products = x[..., i] * x[..., j] * c
        return torch.cat([torch.ones_like(x[..., :1]), x / d ** 0.25, products], -1)

class CosFormer(FeatureMap):
    """[r cos a_t, r sin a_t], r = relu(x), a_t = pi t / (2M): phi(q_t).phi(k_s) = r_q.r_k cos(a_t - a_s). Qin
    2022. Choose M, the number of positions, before training: a text beyond it is a ValueError."""
    floor = 1e-2

    def __init__(self, n_head, head_dim, M=None):
        super().__init__(n_head, head_dim, max_len=number(M, 1024), feature_dim=2 * head_dim)

    def forward(self, x, side='q', t=0):
        steps = t + torch.arange(x.shape[2], device=x.device)       # t may differ from text to text
        end = int(steps.max()) + 1
        if end > self.max_len:
            raise ValueError(f'cosformer knows positions up to {self.max_len}, not {end}: train with '
                             '--phi=cosformer:LENGTH')
        a = steps.to(x.dtype)[..., None] * (math.pi / 2 / self.max_len)
        r = x.relu()
        return torch.cat([r * a.cos(), r * a.sin()], -1)

class T2R(FeatureMap):
    """relu(W x + b). Each layer learns its own W (H, m, d), shared by q and k. m = d unless given. Kasai
    2021. The authors' code first divides q by sqrt(d): that is t2r-scaled."""
    floor = 1e-2    # all features can be zero, which makes n.q zero; the authors' code clamps here

    def __init__(self, n_head, head_dim, m=None, scaled=False):
        m = number(m, head_dim)
        super().__init__(n_head, head_dim, scaled=scaled, feature_dim=m)
        self.weight = nn.Parameter(torch.empty(n_head, m, head_dim))
        self.bias = nn.Parameter(torch.zeros(n_head, 1, m))
        r = math.sqrt(6 / (m + head_dim))
        nn.init.uniform_(self.weight, -r, r)                        # Xavier

    def forward(self, x, side='q', t=0):
        if self.scaled and side == 'q':
            x = x / math.sqrt(self.head_dim)
        return (x @ self.of_heads(self.weight, x).mT + self.of_heads(self.bias, x)).relu()

class Hedgehog(FeatureMap):
    """[softmax(y), softmax(-y)], y = W x. Each layer learns its own W (H, d, d), at first the identity.
    Zhang 2024 sec. 4, with the softmax over features of its appendix A. The other forms:
    exp      [e^(y - max y), e^(min y - y)]: cannot overflow either, but each key has a scale of its own
    paper    e^(W x + b), equation 3 of the paper, d features
    listing  [e^y, e^-y], y = W x + b, the listing of the appendix: q and k have separate W and b
    4        one softmax over all 8d features of [y, -y], W (H, 4d, d). W starts as the identity and 3 random
             rotations, these times 2; any number of maps is possible"""
    like_softmax = True

    def __init__(self, n_head, head_dim, form=None):
        super().__init__(n_head, head_dim, form=form, feature_dim=2 * head_dim)
        if form not in (None, 'softmax', 'exp', 'paper', 'listing') and not form.isdecimal():
            raise ValueError('the forms are hedgehog:softmax, :exp, :paper, :listing, or a number of maps')
        if form == 'paper':
            self.feature_dim = head_dim
        W = torch.eye(head_dim).repeat(n_head, 1, 1)
        b = torch.zeros(n_head, 1, head_dim)
        if form == 'listing':
            W = torch.stack([W, W])
            b = torch.stack([b, b])
        self.many = form is not None and form.isdecimal()
        if self.many:
            maps = number(form, 1)
            self.feature_dim = 2 * head_dim * maps
            for _ in range(maps - 1):
                rotation = torch.linalg.qr(torch.randn(n_head, head_dim, head_dim))[0]
                W = torch.cat([W, 2 * rotation], 1)
        self.weight = nn.Parameter(W)
        self.bias = nn.Parameter(b) if form in ('paper', 'listing') else None

    def forward(self, x, side='q', t=0):
        W = self.weight
        b = self.bias
        if self.form == 'listing':
            W, b = W['qk'.index(side)], b['qk'.index(side)]
        y = x @ self.of_heads(W, x).mT
        if b is not None:
            y = y + self.of_heads(b, x)
        if self.form == 'paper':
            return y.exp()
        if self.form == 'listing':
            return torch.cat([y, -y], -1).exp()
        if self.many:
            return torch.cat([y, -y], -1).softmax(-1)
        if self.form == 'exp':
            return torch.cat([y - y.amax(-1, True), y.amin(-1, True) - y], -1).exp()
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)

class Favor(FeatureMap):
    """FAVOR+: e^(-|x|^2/2) [e^Rx, e^-Rx] / sqrt(2m). E[phi(q).phi(k)] = e^(q.k). Choromanski 2021 sec. 2.3.
    x is first divided by d^(1/4), which gives softmax's e^(q.k / sqrt(d)). R (m, d) has Gaussian rows,
    orthogonal within each d of them; m = d unless given. It is redrawn for each training batch, and it is
    saved in the checkpoint. Long q and k have tiny features: then n.q is below the floor, and o near 0."""
    like_softmax = True

    def __init__(self, n_head, head_dim, m=None):
        m = number(m, head_dim)
        super().__init__(n_head, head_dim, feature_dim=2 * m)
        self.register_buffer('R', torch.empty(m, head_dim))
        self.redraw()

    @torch.no_grad()
    def redraw(self):
        m, d = self.R.shape
        squares = torch.randn(math.ceil(m / d), d, d, device=self.R.device)
        directions = torch.linalg.qr(squares)[0].mT.reshape(-1, d)[:m]
        # A random direction times the length of a Gaussian vector is a Gaussian vector. QR prefers some
        # signs, so the directions are not quite uniform. phi uses both R and -R, so signs do not matter.
        lengths = torch.randn(m, d, device=self.R.device).norm(dim=-1, keepdim=True)
        self.R = (directions * lengths).to(self.R)          # a new tensor: a backward may need the old one

    def forward(self, x, side='q', t=0):
        x = x / self.head_dim ** 0.25
        y = x @ self.R.mT.to(x.dtype)
        size = x.square().sum(-1, keepdim=True) / 2
        return (torch.cat([y, -y], -1) - size).exp() / math.sqrt(self.feature_dim)

class RFA(Favor):
    """[sin(Wx), cos(Wx)] / sqrt(m), |x| = 1, W = R * sigma, sigma (H, d) learned. Peng 2021 sec. 3.1.
    E[phi(q).phi(k)] = exp(-|sigma (q - k)|^2 / 2), a Gaussian. A single draw may be negative. R is that of
    FAVOR+, with orthogonal rows; in the paper they are independent."""
    positive, like_softmax, floor = False, False, 1e-2

    def __init__(self, n_head, head_dim, m=None):
        super().__init__(n_head, head_dim, m)
        self.sigma = nn.Parameter(torch.ones(n_head, 1, head_dim))

    def forward(self, x, side='q', t=0):
        y = (l2(x) * self.of_heads(self.sigma, x)) @ self.R.mT.to(x.dtype)
        return torch.cat([y.sin(), y.cos()], -1) / math.sqrt(len(self.R))

def itself(x):
    return x

def elu1(x):
    """elu(x) + 1. Where x < 0 that is exp(x); e^x - 1 + 1 would round to 0 below -17 in fp32, -6 in bf16."""
    return x.relu() + x.clamp(max=0).exp()

FEATURE_MAPS = {  # name: constructor (n_head, head_dim, [arg]) -> module with .feature_dim
    'identity': partial(FeatureMap, f=itself, positive=False, mean=False),      # Mao 2022: no map
    'elu': partial(FeatureMap, f=elu1),                                         # Katharopoulos 2020 eq. 7
    'relu': partial(FeatureMap, f=torch.relu, floor=1e-2),
    'silu': partial(FeatureMap, f=F.silu, positive=False, mean=False),          # DeltaNet 2024
    'exp': Exp, 't2r': T2R, 't2r-scaled': partial(T2R, scaled=True), 'dpfp': DPFP, 'favor': Favor, 'rfa': RFA,
    'hedgehog': Hedgehog, 'taylor': Taylor, 'cosformer': CosFormer,
}

def feature_map(spec, n_head, head_dim):
    """'dpfp:3' -> FEATURE_MAPS['dpfp'](n_head, head_dim, '3'). ValueError lists the choices."""
    name, _, arg = spec.partition(':')
    if name not in FEATURE_MAPS:
        raise ValueError(f'--phi={spec}: no such feature map; choose from {", ".join(FEATURE_MAPS)}')
    try:
        return FEATURE_MAPS[name](n_head, head_dim, arg or None)
    except ValueError as e:
        raise ValueError(f'--phi={spec}: {e}') from None


# ---- normalisers: what is done to phi(q) and phi(k) --------------------------------------------------------
def l2(x):
    """x / |x|, smooth at 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

def sum_to_one(x):
    """x / sum_i x_i, for features >= 0. All zeros stay zeros. Schlag 2021 sec. 4.2."""
    return x / x.sum(-1, keepdim=True).clamp(min=FLOOR)

NORMALISERS = {
    'attn': itself,         # o_t is divided by n_t.q_t instead: a weighted average. Katharopoulos 2020
    'sum': sum_to_one,      # Schlag 2021
    'l2': l2,               # DeltaNet 2024
    'none': itself,         # Mao 2022
}


# ---- rules: which gates there are --------------------------------------------------------------------------
class Rule(NamedTuple):
    """A row of the table `RULES`. Gates are computed from the layer's input x, see `Gates` in memory.py:
    beta = sigmoid(x W), times --beta_max in rules that erase; log f = -rate dt, dt = softplus(x W + b); log z
    likewise. rate 1 gives f = sigmoid(-(x W + b))."""
    about: str                  # the known model
    phi: str = 'identity'       # feature map, unless the user gives another
    norm: str = 'none'          # normaliser, likewise
    f: str | None = None        # decay along the keys: 'fixed' per head; learned per 'head' or 'channel'
    z: str | None = None        # decay along the values: 'channel'
    write: str | None = None    # None: 1; 'beta': one per head; 'channel'; '1-f'; 'dt': of log f = -rate dt
    erase: str | None = None    # 'write': e = w; 'channel': a beta of its own per channel
    rate: float | None = 1.0    # None: learned, one per head
    keeps: str | None = None    # what is cached: 'all', or by which policy (caches.py); None: the state is S

    @property
    def matrix(self):
        """Whether the state is a matrix."""
        return self.keeps is None

    @property
    def bounded(self):
        """Whether the state is a cache of limited size."""
        return self.keeps not in (None, 'all')

    @property
    def erases(self):
        return self.erase is not None

    @property
    def gated(self):
        """Whether gates are computed from x."""
        return self.f not in (None, 'fixed') or self.write is not None

    @property
    def keeps_first(self):
        """Whether the first tokens stay in the cache."""
        return self.bounded and 'sink' in self.keeps

RULES = {
    'sum': Rule('linear transformer, Katharopoulos 2020; T2R, Performer, Hedgehog by phi', 'elu', 'attn'),
    'gated': Rule('RFA-gate, Peng 2021', 'rfa', 'attn', f='head', write='1-f'),
    'delta': Rule('fast weight programmer, Schlag 2021; DeltaNet', 'silu', 'l2', write='beta', erase='write'),
    'decay': Rule('decaying fast weights, Mao 2022', f='channel', z='channel'),
    'retention': Rule('RetNet, Sun 2023', f='fixed'),
    'gla': Rule('gated linear attention, Yang 2023', f='channel', rate=1 / 16),
    'gla-beta': Rule('GLA as a weighted average, its values written by beta', 'hedgehog', 'attn',
                     f='channel', write='beta', rate=1 / 16),
    'mamba2': Rule('Mamba-2, Dao 2024: a longer step dt writes more and forgets more', 'silu', f='head',
                   write='dt', rate=None),
    'gated_delta': Rule('gated DeltaNet, 2024', 'silu', 'l2', f='head', write='beta', erase='write',
                        rate=None),
    'kda': Rule('Kimi delta attention', 'silu', 'l2', f='channel', write='beta', erase='write', rate=None),
    'gdn2': Rule('gated DeltaNet-2, 2026: each gate by channel', 'silu', 'l2', f='channel', write='channel',
                 erase='channel', rate=None),
    'softmax': Rule('the transformer; its state grows with every token', keeps='all'),
    'window': Rule('softmax over this token and the `--cache` before it', keeps='window'),
    'sink': Rule('window and the first tokens, Xiao 2023 (StreamingLLM)', keeps='sink'),
    'h2o': Rule('the most attended tokens so far and the last ones, half each, Zhang 2023', keeps='h2o'),
    'tova': Rule('keeps the tokens that the last one attends to most, Oren 2024', keeps='tova'),
    'tova-head': Rule('the same, each head for itself', keeps='tova-head'),
    'tova-sink': Rule('tova and the first tokens', keeps='tova-sink'),
    'h2o-layer': Rule('h2o, all heads of a layer together', keeps='h2o-layer'),
    'mean': Rule('as h2o, but by the mean attention per step since the token came', keeps='mean'),
    'mean-v': Rule('the same times the length of its value', keeps='mean-v'),
    'random': Rule('evicts by a fixed hash of position and time: the control', keeps='random'),
}

def rules_that(trait):
    """The names of the rules with this property: rules_that('bounded')"""
    return [name for name, rule in RULES.items() if getattr(rule, trait)]

if __name__ == '__main__':
    print(__doc__.partition('name  ')[0])
