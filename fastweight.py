"""Fast weights: the definition of every update rule, feature map and cache policy of this project.

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
(`recurrent` is the definition, `chunked` computes the same with matrix products), softmax attention with a
cache that grows (`softmax`) or is limited (`bounded`), the feature maps and normalisers for q and k
(`FEATURE_MAPS`, `NORMALISERS`), and the gates f, z, w, e of each known model (`RULES`). The layer around it
is in model.py.

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

Sources: Katharopoulos 2020 (arXiv:2006.16236), Peng 2021 RFA (2103.02143), Schlag 2021 (2102.11174), Kasai
2021 T2R (2103.13076), Choromanski 2021 FAVOR+ (2009.14794), Mao 2022 (2210.04243), Zhang 2024 Hedgehog
(2402.04347), Oren 2024 TOVA (2401.06104); Qin 2022 cosFormer (2202.08791), Sun 2023 RetNet (2307.08621), Yang
2023 GLA (2312.06635), Arora 2024 Based (2402.18668), Yang 2024 DeltaNet (2406.06484), gated DeltaNet
(2412.06464), Kimi 2025 KDA (2510.26692), Dao 2024 Mamba-2 (2405.21060), Hatamizadeh 2026 gated DeltaNet-2
(2605.22791), Zhang 2023 H2O (2306.14048), Xiao 2023 StreamingLLM (2309.17453).
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
    """ValueError where o / (n.q), n the sum of the keys, would not be a weighted average of the values. (For
    the delta rule --norm=attn means something else, see FastWeights.divided_by_keys in model.py.)"""
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
# Why at most 16 steps in a chunk whose channels decay here, but 32 in kernels.py? A step is at most 8 steps
# away from the middle. At -5 per step its factors stay within exp(+-40). If keys and values both decay, U^T x
# has a key's factor times a value's: up to exp(80), and fp32 ends at exp(88). kernels.py brings both to the
# chunk's end, where they are at most 1, before it multiplies them, and its backward has no gradient of a
# factor. (With decay on one side only, 32 steps are safe here, too: what is inf above the diagonal is masked.
# In 64, a factor itself may be inf and its partner 0, and inf * 0 is NaN.) So a channel keeps at least e^-5
# per step, in layers, too (`Gates` in model.py), as in GLM-5.3, Ling, flash-linear-attention's `safe_gate`.
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
    Letters as above and in kernels.py."""
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


# ---- write all, then read ----------------------------------------------------------------------------------
# First write all steps into S, then let every query read the same S: o_t = S q_t. If the queries come from
# the text that was written, this is an encoder: each step sees the whole text. If they come from another
# text, it is cross attention. The decoder then reads from a state of fixed size.

def in_any_order(erase, log_f, log_z):
    """Whether nothing is forgotten or erased. S is then a plain sum, in which the order does not matter."""
    return erase is None and log_f is None and log_z is None

@full_precision
def write_all(k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, form=chunked):
    """S after all steps, (B, H, V, K). Arguments as for `recurrent`; `form` computes the recurrence. If the
    order of the steps does not matter, S + sum_t w_t v_t k_t^T is one product."""
    if in_any_order(erase, log_f, log_z):
        _, k, v, w, _, _, _, S = filled(k, k, v, write, erase, log_f, log_z, S, normalise)
        return S + (w * v).mT @ k
    return form(k, k, v, write, erase, log_f, log_z, S, normalise)[1]

@full_precision
def read_all(q, S, normalise=False, floor=FLOOR):
    """o_t = S q_t for any number of queries. q (B, H, T, K)  ->  (B, H, T, V)"""
    return finish(q.to(S.dtype) @ S.mT, normalise, floor, q.dtype)

def where_real(real, v, gates):
    """Gates for a text with padding. real (B, T) is false where a step is padding. Such a step writes and
    erases with strength 0 and forgets nothing, so it leaves S alone. v (B, H, T, V)"""
    real = real[:, None].to(v.dtype)
    masked = {'write': real.expand(v.shape[:3])}
    for name, x in gates.items():
        if x is not None:
            masked[name] = x * (real if x.dim() == 3 else real[..., None])
    return masked

@full_precision
def encoded(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR,
            real=None, form=chunked):
    """`recurrent` for an encoder: same arguments, but each step reads what all steps have written. real
    (B, T) says which steps are not padding (None: all). `form` computes the recurrence.

    If steps are forgotten or erased, their order matters, so the text is read in both directions. The output
    is S_t q_t, from the steps up to t, plus D_t q_t of the reversed text. D_t is read before step t is
    written, so each step counts once. Numerators and denominators are added separately, then divided."""
    dtype = v.dtype
    gates = {'write': write, 'erase': erase, 'log_f': log_f, 'log_z': log_z}
    if real is not None:
        gates = where_real(real, v, gates)
    if in_any_order(erase, log_f, log_z):
        S = write_all(k, v, gates['write'], S=S, normalise=normalise)
        return read_all(q, S, normalise, floor), S
    decays = gates.get('log_f'), gates.get('log_z')
    _, _, v, _, _, log_f, log_z, S = filled(q, k, v, write, erase, *decays, S, normalise)
    o, S = form(q, k, v, **gates, S=S)
    reversed_text = {name: x.flip(2) for name, x in {'k': k, 'v': v, **gates}.items() if x is not None}
    next_q = (log_f.exp() * q).flip(2).roll(-1, 2)          # D_t q_t = z_t * (S_{t+1} (f_t * q_t))
    later, _ = form(next_q, **reversed_text)
    later = F.pad(later.flip(2)[:, :, 1:], (0, 0, 0, 1))    # nothing follows the last step
    return finish(o + log_z.exp() * later, normalise, floor, dtype), S


# ---- the other kind of state: a cache of key/value pairs ---------------------------------------------------
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
    longer: kernels.longer does the same without copying"""
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

def softmax_of_all(q, k, v, real=None):
    """`softmax` for an encoder: each step sees all steps except padding. real (B, T) or None"""
    mask = None
    if real is not None:
        mask = real[:, None, None]
    return attention(q, k, v, mask), dict(k=k, v=v)

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

def turned(q, k, pos, rope, positions):
    """Rotate q (B, H, T, d), of the last T tokens, and k (B, G, tokens, d) by `compressed` positions."""
    pos = compressed(pos, positions)
    own = for_heads(pos[:, :, -q.shape[2]:], q.shape[1])
    return rope(q, own), rope(k, pos)

def attend_cached(q, cached, seen, turn=None, scores=None):
    """Softmax attention of q (B, H, T, d) under the mask `seen` (B, G, 1|T, tokens). The last T cached tokens
    are q's own. scores: `cached_scores`, if they are known  ->  o (B, H, T, d), the weights, summed over the
    H / G heads that share keys, (B, G, T, tokens), log of the denominators (B, H, T, 1)"""
    k = cached['k']
    if turn is not None:
        q, k = turn(q, k, cached['pos'])
    if scores is None:
        scores = cached_scores(q, k)
    scores = scores.to(cached['total'].dtype).masked_fill(~seen[:, :, None], NEVER)
    weights = scores.softmax(-1)
    top = scores.argmax(-1, keepdim=True)                           # torch.logsumexp is slow with NEVER
    log_sum = scores.gather(-1, top) - weights.gather(-1, top).log()
    o = weights.to(k.dtype).flatten(2, 3) @ cached['v']
    return o.view_as(q).to(q.dtype), weights.sum(2), log_sum.flatten(1, 2)

def bounded_step(q, k, v, cached, t, policy, cache, sinks, spill, turn):
    """`bounded` for one step: append the step, attend, score the cached tokens, evict one."""
    cached = append(cached, k, v, t)
    real = cached['pos'] >= 0
    o, a, log_mass = attend_cached(q, cached, real[:, :, None], turn)
    total = cached['total'] + a[:, :, 0]
    worth = POLICIES[policy](a[:, :, 0], total, cached['pos'], cached['v'], t, cache, sinks)
    worth = worth.nan_to_num(0).masked_fill(~real, -math.inf)       # evict empty slots first
    worst = worth == worth.amin(-1, keepdim=True)
    gone = torch.where(worst, cached['pos'], t + 1).argmin(-1, keepdim=True)
    if spill:                                                       # the first read only gave the scores
        place = torch.arange(cache + 1, device=q.device)
        stays = real & (place != gone)
        o, a, log_mass = attend_cached(q, cached, stays[:, :, None], turn)
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
def bounded(q, k, v, cached, t, policy, cache, sinks=0, spill=False, turn=None):
    """Softmax attention with at most `cache` cached tokens: the definition, step by step.
    q (B, H, T, d)   k, v (B, G, T, d)   t position of the first step   policy from POLICIES
    sinks < cache: how many first tokens `sink` and `tova-sink` never evict
    cached None, or the cache that the last call returned: k, v (B, G, cache, d), pos, total (B, G, cache),
    in any order. pos is -1 in an empty slot.
    spill: evict before the step reads. The evicted token then goes into a matrix and must not count twice.
    Cache in model.py averages cache and matrix by their denominators.
    turn(q, k, pos): `turned`, with rope. Keys then come without it.
    ->  o (B, H, T, d), log of the denominators (B, H, T, 1), the T evicted tokens, one per step, the cache"""
    if cached is None:
        cached = empty_slots(k, cache)
    steps = []
    for i in range(q.shape[2]):
        q_t, k_t, v_t = (x[:, :, i:i + 1] for x in (q, k, v))
        steps.append(bounded_step(q_t, k_t, v_t, cached, t + i, policy, cache, sinks, spill, turn))
        cached = steps[-1][-1]
    return joined(steps)


# ---- feature maps phi: (B, H, T, head_dim) -> (B, H, T, feature_dim) ---------------------------------------
class FeatureMap(nn.Module):
    """phi(x, side, t): x (B, H, T, head_dim), side 'q' or 'k', t the position of the first step. This class
    applies f to each entry; others override forward.
    positive      no feature is ever negative, so the normaliser `sum` may divide by their sum
    mean          phi(q).phi(k) >= 0 (random features: on average), so `attn` may divide by n.q
    floor         the smallest n.q to divide by
    like_softmax  phi(q).phi(k) approximates softmax's exp(q.k / sqrt(head_dim)), or is trained to
    max_len       the number of positions that the map knows; None: no limit
    moves         the features of q depend on the keys so far"""
    positive, mean, floor, like_softmax, max_len, moves = True, True, FLOOR, False, None, False

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

SHARPNESS = 0.3         # of slots, at first

class Slots(FeatureMap):
    """A key is written to those of m slots that it belongs to, softmax(W k + b). Their values add up in S. A
    query reads each slot by softmax's weight for its mean key c, e^(q.c / sqrt(d)): see FastWeights.asked. So
    S is a cache of m tokens, each the mean of similar ones. m = 3d unless given. Each head learns its own W
    (H, m, d) and b. Peng 2022 (ABC, arXiv:2110.02488), Zhang 2024 (gated slot attention, 2409.07146)."""
    like_softmax, moves = True, True

    def __init__(self, n_head, head_dim, m=None):
        m = number(m, 3 * head_dim)
        super().__init__(n_head, head_dim, feature_dim=m)
        self.weight = nn.Parameter(torch.randn(n_head, m, head_dim) / math.sqrt(head_dim))
        self.bias = nn.Parameter(torch.zeros(n_head, 1, m))

    def forward(self, x, side='q', t=0):
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
    'hedgehog': Hedgehog, 'slots': Slots, 'taylor': Taylor, 'cosformer': CosFormer,
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
    """A row of the table `RULES`. Gates are computed from the layer's input x, see `Gates` in model.py:
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
    keeps: str | None = None    # what is cached: 'all', or by which policy; None: nothing, the state is S

    @property
    def matrix(self):
        """Whether the state is a matrix."""
        return self.keeps is None

    @property
    def bounded(self):
        """Whether the state is a cache of limited size."""
        return self.keeps not in (None, 'all')

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

if __name__ == '__main__':
    print(__doc__.partition('name  ')[0])
