"""Fast weights: every update rule, feature map and cache policy of this project, each as its definition.

A network has slow weights, which training changes. It can also have fast weights, which it writes itself
while it reads (Schmidhuber 1991, 1992). Here each head keeps a matrix S. At each step the slow weights turn a
token into a key (where to write), a value (what to write) and a query (where to read). Writing adds v k^T to
S. Reading is S q. Below, one head makes three writes. The third one goes to the first key again:

>>> k = torch.tensor([[[[1., 0.], [0., 1.], [1., 0.]]]])
>>> v = torch.tensor([[[[1., 2.], [3., 4.], [5., 6.]]]])
>>> recurrent(k, k, v)[1]                                       # rule `sum`
tensor([[[[6., 3.],
          [8., 4.]]]])
>>> one = torch.ones(1, 1, 3)
>>> recurrent(k, k, v, write=one, erase=one)[1]                 # rule `delta`
tensor([[[[5., 3.],
          [6., 4.]]]])

The columns of S are what the two keys find. A sum piles up: the first key finds (6, 8), the sum of both its
values. The delta rule first takes out what the key already finds, so the first key finds (5, 6), its last
value. The other key finds what it found before. All rules of this project are settings of one equation:

    D_t = (z_t f_t^T) * S_{t-1}                             forget   (* elementwise, z f^T an outer product)
    S_t = D_t + (w_t * v_t - D_t (e_t * k_t)) k_t^T         write, erase what the key already finds
    o_t = S_t q_t                                           read, after the write

S has the same size after any number of steps, so a model of such layers is an RNN. This file has, from top to
bottom: the equation (`recurrent`, the definition; `chunked`, the same in matrix products); attention, whose
state is a list of keys and values instead (`softmax`; `bounded` keeps only some of them); what is done to q
and k before (`FEATURE_MAPS`, `NORMALISERS`); and the gates f, z, w, e of each known model (`RULES`). The
layer around it is in model.py.

name          shape           meaning                         the papers' letter
B H T         sizes           batch, heads, time steps
K V C         sizes           features of q, k; of v; chunk   d_dot, d_value (Schlag), k (Kasai), 2m (FAVOR+)
q k           (B, H, T, K)    query, key, after the map phi   phi(q), phi(k)
v             (B, H, T, V)    value
S             (B, H, V, K)    fast weights: the state         W (Schlag), S (Katharopoulos, Mao, Kasai)
n             (B, H, K)       last row of S if `normalise`    z (Katharopoulos, Schlag, Kasai)
log_f         (B, H, T, K|1)  log decay along the keys, <= 0  log of sigma(f_key) (Mao), g (Peng), alpha (GLA)
log_z         (B, H, T, V|1)  log decay along the values      log sigma(f) (Mao)
write         (B, H, T, V|1)  w_t, along the values           beta (Schlag), 1 - g (Peng), w (GDN-2)
erase         (B, H, T, K|1)  e_t, along the keys             beta (Schlag), b (GDN-2)
o             (B, H, T, V)    what is read                    y
u             (B, H, T, V)    pseudo-value: what S receives   beta (v - v_bar) (Schlag)
K|1, V|1: one number per channel, or one per head. In the second case write and erase may be (B, H, T).

Sources: Katharopoulos 2020 (arXiv:2006.16236), Peng 2021 RFA (2103.02143), Schlag 2021 (2102.11174), Kasai
2021 T2R (2103.13076), Choromanski 2021 FAVOR+ (2009.14794), Mao 2022 (2210.04243), Zhang 2024 Hedgehog
(2402.04347), Oren 2024 TOVA (2401.06104); Qin 2022 cosFormer (2202.08791), Sun 2023 RetNet (2307.08621), Yang
2023 GLA (2312.06635), Arora 2024 Based (2402.18668), Yang 2024 DeltaNet (2406.06484), gated DeltaNet
(2412.06464), Kimi 2025 KDA (2510.26692), Dao 2024 Mamba-2 (2405.21060), Hatamizadeh 2026 gated DeltaNet-2
(2605.22791), Zhang 2023 H2O (2306.14048), Xiao 2023 StreamingLLM (2309.17453).
"""
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

LOG_MIN = -5.0  # smallest log-decay per step: 0.7 % is left. Factors of a chunk could overflow below it
FLOOR = 1e-6    # smallest denominator. Maps whose features can all be 0 ask for 1e-2


# ---- the equation ------------------------------------------------------------------------------------------
def refuse_mean(write, erase, log_z):
    """ValueError if dividing by n.q would not give a weighted average of the values; n: sum of keys.
    (For the delta rule --norm=attn means something else: FastWeights.divided_by_keys in model.py.)"""
    if erase is not None:
        raise ValueError('normalise with erase: erasing makes weights negative, so their sum n.q may be <= 0')
    vectors = {'write': write, 'log_z': log_z}
    for name, x in vectors.items():
        if x is not None and x.dim() == 4 and x.shape[-1] > 1:
            raise ValueError(f'normalise with a vector {name}: each value channel needs a denominator of its '
                             'own')

def start(q, k, v, write, erase, log_f, log_z, S, normalise):
    """What every form does first: cast to fp32 (fp64 stays), clamp log-decays, begin with S_0 = 0. Absent
    gates stay None. normalise: v gets a channel that is always 1. The last row of S is then n, the sum of the
    keys, weighted and decayed as their values are.  ->  q, k, v; w, e, log_f, log_z (B, H, T, .); S"""
    if normalise:
        refuse_mean(write, erase, log_z)
        v = F.pad(v, (0, 1), value=1.0)
    if S is None:
        B, H, _, K = k.shape
        S = v.new_zeros(B, H, v.shape[-1], K)
    if log_f is not None:
        log_f = log_f.clamp(min=LOG_MIN)
    if log_z is not None:
        log_z = log_z.clamp(min=LOG_MIN)
    dtype = torch.promote_types(v.dtype, torch.float32)
    tensors = [q, k, v, write, erase, log_f, log_z, S]
    for i, x in enumerate(tensors):
        if x is None:
            continue
        if x.dim() == 3:
            x = x[..., None]
        if x.dtype != dtype:
            x = x.to(dtype)
        tensors[i] = x
    return tensors

def filled(*given):
    """`start`, but absent gates become constants that change nothing."""
    q, k, v, *gates, S = start(*given)
    for i, neutral in enumerate((1.0, 0.0, 0.0, 0.0)):
        if gates[i] is None:
            gates[i] = torch.full_like(v[..., :1], neutral)
    return q, k, v, *gates, S

def finish(o, normalise, floor, dtype):
    """Divide by n_t . q_t. It is clamped from below, not shifted: a shift would bias every output."""
    if normalise:
        n_q = o[..., -1:].clamp(min=floor)
        o = o[..., :-1] / n_q
    return o.to(dtype)

def outer(a, b):
    """a b^T. a (B, H, V)  b (B, H, K)  ->  (B, H, V, K)"""
    return a[..., :, None] * b[..., None, :]

def find(S, x):
    """S x: what the key or query x finds. S (B, H, V, K)  x (B, H, K)  ->  (B, H, V)"""
    return (S @ x[..., None]).squeeze(-1)

def recurrent(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR):
    """The definition: one step after the other, O(T V K). Only S is carried from step to step.

        D_t = (z_t f_t^T) * S_{t-1}    S_t = D_t + (w_t * v_t - D_t (e_t * k_t)) k_t^T    o_t = S_t q_t

    q, k (B, H, T, K)   v (B, H, T, V)   log_f, erase (B, H, T, K|1)   log_z, write (B, H, T, V|1)
    write, erase may be (B, H, T)   S (B, H, V, K), with `normalise` (B, H, V + 1, K)
    ->  o (B, H, T, V), last S (fp32; fp64 for fp64 inputs)
    A gate that is None is left out: w = 1, e = 0, f = z = 1, S = 0. Log-decays are clamped at LOG_MIN = -5.
    normalise: o_t is divided by max(n_t . q_t, floor), which makes it a weighted average of values
    (Katharopoulos 2020 sec. 3.2). ValueError for normalise with erase, or with a vector write or log_z:
    `refuse_mean` says why. From Schlag 2021 sec. 4.2 (w = e = beta), Mao 2022 (f, z), Peng 2021 (f = g,
    w = 1-g), KDA (f, w = e), Gated DeltaNet-2 (f, w, e).

    If you change it, test_recurrent_is_the_equation fails, and scripts still run the faster forms: give them
    --impl=loop to run yours."""
    dtype = v.dtype
    q, k, v, w, e, log_f, log_z, S = filled(q, k, v, write, erase, log_f, log_z, S, normalise)
    f = log_f.exp()
    z = log_z.exp()
    o = []
    for t in range(q.shape[2]):
        q_t, k_t, v_t, w_t, e_t, f_t, z_t = (x[:, :, t] for x in (q, k, v, w, e, f, z))
        D = outer(z_t, f_t) * S                                             # forget
        S = D + outer(w_t * v_t - find(D, e_t * k_t), k_t)                  # write, erase
        o.append(find(S, q_t))                                              # read
    return finish(torch.stack(o, 2), normalise, floor, dtype), S


# ---- the same in matrix products ---------------------------------------------------------------------------
# A chunk is C steps at once. Q, K, V have one row per step. S is the state before the chunk, S' after it.
#
# 1. sum. A query finds what S gives it, and what the steps of the chunk up to its own have written. Their
#    weights are a C x C tile: q_t . k_s in row t and column s. The causal mask, tril(), takes out the future:
#
#           s = 1  2  3  4          O  = tril(Q K^T) V + Q S^T
#     t = 1     x  .  .  .          S' = S + V^T K
#         2     x  x  .  .
#         3     x  x  x  .          x is kept, . is masked
#         4     x  x  x  x
#
# 2. delta. Step t writes u_t k_t^T. It looks for e_t * k_t in S and in what the chunk has written so far, and
#    takes off what it finds there:
#        u_t = w_t * v_t - S (e_t * k_t) - sum_{s<t} u_s (k_s . (e_t * k_t))
#    So u_t depends on earlier u_s. For all steps together this is a linear system, with R = e * K:
#        (I + L) U = w * V - R S^T,    L = tril(R K^T, -1)
#    L is strictly lower triangular: it is solved from the first row to the last. U then replaces V in 1.
#
# 3. one decay per head. What step s wrote has shrunk by exp(a_t - a_s) when step t reads it; a is the running
#    sum of log f. This is a factor for t times a factor for s, so each goes into its own row. Both start
#    from the middle step, where a = m, so that neither becomes large:
#        y = exp(a - m) Q        x = exp(m - a) K        S_m = exp(m) S, the state as the middle sees it
#        A = tril(y x^T)         O = A V + y S_m^T       S' = exp(a_C - m) (S_m + V^T x)
#
# 4. one decay per channel, of keys and of values. For keys the factors become vectors, and nothing else
#    changes. Values get factors of the same kind; c is the running sum of log z, c_m its value at the middle:
#        U = exp(c_m - c) V      O = exp(c - c_m) (A U + y S_m^T)        the rows of S_m and S' alike
#
# 5. delta with decays. Keys look for what to erase as queries do: r = exp(a - m) (e * K). What is found gets
#    exp(c - c_m) when it is read and exp(c_m - c) when it is written, and these cancel:
#        (I + L) U = exp(c_m - c) (w * V) - r S_m^T,    L = tril(r x^T, -1)
#
# Why has a decaying chunk 16 steps here, and up to 32 in kernels.py? At -5 per step, 8 steps from the middle,
# a factor is within exp(+-40). Where keys and values both decay, autograd multiplies the gradient of one
# factor by another factor: exp(80), and fp32 ends at exp(88). The backward by hand in kernels.py needs no
# gradient of a factor: that of log f_t is what is read less what is written, from step t on. (With decays on
# one side only, 32 steps would work here, too.)
# A trap: above the diagonal, a longer chunk's tile holds inf. Masked too late, its gradient is inf * 0.
DECAYING = 16

def factors(log_decay):
    """Log-decays of a chunk (B, H, C, d), a their running sum, m = a at the middle step  ->  exp(a - m) and
    exp(m - a) of that shape, exp(m) and exp(a_C - m) (B, H, 1, d)"""
    a = log_decay.cumsum(2)
    m = a[:, :, a.shape[2] // 2, None].detach()             # no result depends on m
    return (a - m).exp(), (m - a).exp(), m.exp(), (a[:, :, -1:] - m).exp()

def chunked(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR,
            chunk=64):
    """`recurrent` in matrix products, with a state between chunks. Same arguments, same results, any T >= 1.
    O(T (C (K + V) + K V)): short chunks cost less arithmetic, long chunks make fewer and larger products.
    Letters as above and in kernels.py: y reads, x is written, r is the key as it looks for what to erase."""
    dtype = v.dtype
    if log_f is not None or log_z is not None:
        chunk = min(chunk, DECAYING)
    q, k, v, w, e, log_f, log_z, S = filled(q, k, v, write, erase, log_f, log_z, S, normalise)
    o = []
    for i in range(0, q.shape[2], chunk):
        Q, K, V, w_i, e_i, f_i, z_i = (rows[:, :, i:i + chunk] for rows in (q, k, v, w, e, log_f, log_z))
        f_up, f_down, f_in, f_out = factors(f_i)
        z_up, z_down, z_in, z_out = factors(z_i)
        y = Q * f_up
        x = K * f_down
        U = w_i * V * z_down
        S = S * f_in * z_in.mT                              # S_m
        if erase is not None:
            r = e_i * K * f_up
            L = (r @ x.mT).tril(-1)
            Y = U - r @ S.mT
            U = torch.linalg.solve_triangular(L, Y, upper=False, unitriangular=True)        # (I + L) U = Y
        A = (y @ x.mT).tril()
        o.append(z_up * (A @ U + y @ S.mT))
        S = (S + U.mT @ x) * f_out * z_out.mT
    return finish(torch.cat(o, 2), normalise, floor, dtype), S


# ---- write all, then read ----------------------------------------------------------------------------------
# The equation, cut in two: first S after all steps, then o_t = S q_t with the same S for every query. If the
# queries come from the same text, this is an encoder, in which each step sees the whole text. If they come
# from another text, it is cross attention, and what a decoder reads from has the same size at every step.

def in_any_order(erase, log_f, log_z):
    """Whether nothing is forgotten or erased. The order of the steps does not matter then."""
    return erase is None and log_f is None and log_z is None

def write_all(k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, form=chunked):
    """S after all steps, (B, H, V, K). Arguments as for `recurrent`; `form` is one of its forms. If the order
    of the steps does not matter, it is S + sum_t w_t v_t k_t^T: one product."""
    if in_any_order(erase, log_f, log_z):
        _, k, v, w, _, _, _, S = filled(k, k, v, write, erase, log_f, log_z, S, normalise)
        return S + (w * v).mT @ k
    return form(k, k, v, write, erase, log_f, log_z, S, normalise)[1]

def read_all(q, S, normalise=False, floor=FLOOR):
    """o_t = S q_t, of any number of queries q (B, H, T, K)  ->  (B, H, T, V)"""
    return finish(q.to(S.dtype) @ S.mT, normalise, floor, q.dtype)

def where_there(there, v, gates):
    """Gates with which padding changes nothing: it writes and erases with strength 0 and forgets nothing, so
    S stays as it is. there (B, T) is false for padding   v (B, H, T, V)"""
    there = there[:, None].to(v.dtype)
    found = {'write': there.expand(v.shape[:3])}
    for name, x in gates.items():
        if x is not None:
            found[name] = x * (there if x.dim() == 3 else there[..., None])
    return found

def encoded(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR,
            there=None, form=chunked):
    """`recurrent` for an encoder. Same arguments, but each step reads what all steps have written. there
    (B, T) says which steps are not padding (None: all). `form` is the form of the recurrence.

    If steps are forgotten or erased, their order matters, and the text is read in both directions. S_t q_t
    finds the steps up to t. D_t q_t in the reversed text, read before step t is written there, finds the
    others. So each step counts once. Numerators and denominators are added separately."""
    dtype = v.dtype
    gates = {'write': write, 'erase': erase, 'log_f': log_f, 'log_z': log_z}
    if there is not None:
        gates = where_there(there, v, gates)
    if in_any_order(erase, log_f, log_z):
        S = write_all(k, v, gates['write'], S=S, normalise=normalise)
        return read_all(q, S, normalise, floor), S
    decays = gates.get('log_f'), gates.get('log_z')
    _, _, v, _, _, log_f, log_z, S = filled(q, k, v, None, erase, *decays, S, normalise)
    o, S = form(q, k, v, **gates, S=S)
    reversed_text = {name: x.flip(2) for name, x in {'k': k, 'v': v, **gates}.items() if x is not None}
    next_q = (log_f.exp() * q).flip(2).roll(-1, 2)          # D_t q_t = z_t * (S_{t+1} (f_t * q_t))
    later, _ = form(next_q, **reversed_text)
    later = F.pad(later.flip(2)[:, :, 1:], (0, 0, 0, 1))    # behind the last step there is nothing
    return finish(o + log_z.exp() * later, normalise, floor, dtype), S


# ---- the other kind of state: a list of rows ---------------------------------------------------------------
def softmax(q, k, v, rows=None):
    """Softmax attention under the same interface. Its state is the key and value of every step, so it grows.
    q, k, v (B, H, T, d)   rows None or dict(k, v) (B, H, T0, d)  ->  o (B, H, T, d), dict(k, v) of T0 + T"""
    if rows is not None:
        k = torch.cat([rows['k'], k], 2)
        v = torch.cat([rows['v'], v], 2)
    T = q.shape[2]
    T_all = k.shape[2]
    mask = None
    if 1 < T < T_all:
        mask = q.new_ones(T, T_all, dtype=torch.bool).tril(T_all - T)
    causal = bool(T == T_all > 1)                               # a bool also where sizes are traced
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal), dict(k=k, v=v)

def softmax_of_all(q, k, v, there=None):
    """`softmax` of an encoder: each step sees all steps except padding. there (B, T) or None"""
    mask = None
    if there is not None:
        mask = there[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask), dict(k=k, v=v)

# A transformer is an RNN whose state is a growing list of keys and values; here a row is one such pair. If at
# most `cache` rows are kept, the state is finite (Oren 2024 sec. 3). A step sees the rows kept so far and its
# own. When there are too many, the row with the lowest score is evicted; ties evict the oldest. A policy has
# the scores, (B, H, rows), from: a, the attention that this step pays to each row; total, the attention since
# the row came; pos, positions; t, the position of this step. a and total are per head. `tova` averages over
# heads; `random` is a fixed hash of position and time, the same everywhere.
POLICIES = {
    'window': lambda a, total, pos, t, cache, sinks: pos.float(),
    'sink': lambda a, total, pos, t, cache, sinks: pos.float().masked_fill(pos < sinks, math.inf),
    'h2o': lambda a, total, pos, t, cache, sinks: total.masked_fill(pos > t - cache // 2, math.inf),
    'tova': lambda a, total, pos, t, cache, sinks: a.mean(1, keepdim=True).expand_as(a),
    'tova-head': lambda a, total, pos, t, cache, sinks: a,
    'random': lambda a, total, pos, t, cache, sinks: ((pos * 40503 + t * 30011) % 65537).float(),
}
NEVER = -1e30   # a score that counts nothing beside others. With -inf, no rows at all would make NaN

def compressed(pos):
    """Positions (B, H, rows) in any order. Each gap g > 10 counts as ceil(10 + ln ln(g - 10 + e)): 11 to
    13. Oren 2024, appendix, and its authors' code."""
    in_order, order = pos.sort()
    gap = in_order.diff(dim=-1, prepend=in_order[..., :1]).float()
    beyond = (gap - 10).clamp(min=0)
    near = (gap.clamp(max=10) + (beyond + math.e).log().log()).ceil().cumsum(-1)
    return torch.zeros_like(near).scatter(-1, order, near)

def empty_rows(k, cache):
    """Room for `cache` rows, all empty: pos is -1. k (B, H, T, d)"""
    B, H, _, d = k.shape
    empty = k.new_zeros(B, H, cache, d)
    total = torch.zeros(B, H, cache, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    return dict(k=empty, v=empty, pos=total.long() - 1, total=total)

def append(rows, k, v, t):
    """The rows, and behind them those of the steps t, t + 1, ... with keys and values k, v (B, H, T, d)."""
    steps = t + torch.arange(k.shape[2], device=k.device)
    pos = steps.expand(k.shape[:3])
    new = dict(k=k, v=v, pos=pos, total=torch.zeros_like(pos, dtype=rows['total'].dtype))
    return {name: torch.cat([rows[name], new[name]], 2) for name in new}

def pick(rows, index):
    """The rows at index (B, H, n)."""
    wide = index[..., None]
    return {name: x.take_along_dim(wide if x.dim() == 4 else index, 2) for name, x in rows.items()}

def replaced(rows, index):
    """The rows without the one at index (B, H, 1). The last row takes its place."""
    kept = {}
    for name, x in rows.items():
        place = index
        if x.dim() == 4:
            place = index[..., None].expand(-1, -1, -1, x.shape[-1])
        kept[name] = x.scatter(2, place, x[:, :, -1:])[:, :, :-1]
    return kept

def attend(q, rows, seen, turn=None):
    """Softmax attention of q (B, H, T, d) to the rows that are `seen` (B, H, 1|T, rows). q's own come last.
    ->  o (B, H, T, d), weights (B, H, T, rows), log of their denominator (B, H, T, 1)"""
    k = rows['k']
    if turn is not None:
        pos = compressed(rows['pos'])
        k = turn(k, pos)
        q = turn(q, pos[:, :, -q.shape[2]:])
    scores = (q @ k.mT).to(rows['total'].dtype) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, NEVER)
    weights = scores.softmax(-1)
    top = scores.argmax(-1, keepdim=True)                           # logsumexp's exp is slow where NEVER is
    log_sum = scores.gather(-1, top) - weights.gather(-1, top).log()
    return weights.to(q.dtype) @ rows['v'], weights, log_sum

def bounded_step(q, k, v, rows, t, policy, cache, sinks=0, spill=False, turn=None):
    """`bounded` for one step: append, attend, score the rows, evict the lowest."""
    rows = append(rows, k, v, t)
    real = rows['pos'] >= 0
    o, a, log_mass = attend(q, rows, real[:, :, None], turn)
    total = rows['total'] + a[:, :, 0]
    worth = POLICIES[policy](a[:, :, 0], total, rows['pos'], t, cache, sinks)
    worth = worth.masked_fill(~real, -math.inf)                     # empty ones are evicted first
    worst = worth == worth.amin(-1, keepdim=True)
    gone = torch.where(worst, rows['pos'], t + 1).argmin(-1, keepdim=True)
    if spill:                                                       # the first time was for the scores only
        place = torch.arange(cache + 1, device=q.device)
        stays = real & (place != gone)
        o, a, log_mass = attend(q, rows, stays[:, :, None], turn)
        total = rows['total'] + a[:, :, 0]
    rows['total'] = total
    return o, log_mass, pick(rows, gone), replaced(rows, gone)

def joined(parts):
    """What `bounded` returns for a text, joined from its parts."""
    o, log_mass, went, rows = zip(*parts)
    went = {name: torch.cat([part[name] for part in went], 2) for name in went[0]}
    return torch.cat(o, 2), torch.cat(log_mass, 2), went, rows[-1]

def bounded(q, k, v, rows, t, policy, cache, sinks=0, spill=False, turn=None):
    """Softmax attention that keeps at most `cache` rows, by one of POLICIES: the definition, step by step.
    q, k, v (B, H, T, d)   t position of the first step   sinks < cache: how many first rows `sink` protects
    rows None, or what was returned before: k, v (B, H, cache, d), pos, total (B, H, cache), in any order; pos
    is -1 for empty ones
    spill: evict before reading. The evicted row is then in a matrix that is read, too, and must not count
    twice (FastWeights.keep_rows in model.py)
    turn(x, pos): rope, for keys that come without it and are rotated by `compressed` positions
    ->  o (B, H, T, d), log of the denominators (B, H, T, 1), the row evicted at each step (T rows), rows"""
    if rows is None:
        rows = empty_rows(k, cache)
    steps = []
    for i in range(q.shape[2]):
        q_t, k_t, v_t = (x[:, :, i:i + 1] for x in (q, k, v))
        steps.append(bounded_step(q_t, k_t, v_t, rows, t + i, policy, cache, sinks, spill, turn))
        rows = steps[-1][-1]
    return joined(steps)


# ---- feature maps phi: (B, H, T, head_dim) -> (B, H, T, feature_dim) ---------------------------------------
class FeatureMap(nn.Module):
    """phi(x, side, t): x (B, H, T, head_dim), side 'q' or 'k', t position of its first row. Here f, by entry.
    positive      no feature is ever negative, so norm `sum` may divide by their sum
    mean          phi(q).phi(k) >= 0, at least on average over random draws, so `attn` may divide by n.q
    floor         the smallest number that `attn` divides by
    like_softmax  phi(q).phi(k) stands for softmax's exp(q.k / sqrt(head_dim)), or can learn to
    max_len       how many positions are known; None: no limit"""
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

def number(arg, default):
    """What follows the colon of --phi=dpfp:3: a number above 0, whole if the default is whole."""
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
    """exp(s x), s = 1 unless given. In Zhang 2024 sec. 3, s = 2 is spiky enough to recall, s = 1 is not."""
    def __init__(self, n_head, head_dim, s=None):
        super().__init__(n_head, head_dim, s=number(s, 1.0))

    def forward(self, x, side='q', t=0):
        return (self.s * x).exp()

class DPFP(FeatureMap):
    """r_i r_{i+j}, r = relu([x; -x]), i cyclic, j = 1..nu, nu = 1 unless given. Schlag 2021 sec. 5.4.

    >>> DPFP(1, 2)(torch.tensor([1., -2.]))         # r = (1, 0, 0, 2), times its neighbours (0, 0, 2, 1)
    tensor([0., 0., 0., 2.])
    """
    floor = 1e-2

    def __init__(self, n_head, head_dim, nu=None):
        nu = number(nu, 1)
        super().__init__(n_head, head_dim, nu=nu, feature_dim=2 * head_dim * nu)
        if nu >= 2 * head_dim:
            raise ValueError(f'nu counts shifts of 2 x {head_dim} entries: 1..{2 * head_dim - 1}')

    def forward(self, x, side='q', t=0):
        r = torch.cat([x, -x], -1).relu()
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.nu + 1)], -1)

class Taylor(FeatureMap):
    """[1, x / d^(1/4), x_i x_j / sqrt(d) (i < j), x_i^2 / sqrt(2d)]: phi(q).phi(k) = 1 + s + s^2/2 >= 1/2,
    s = q.k / sqrt(d), the series of softmax's e^s. Zhang 2024 sec. 3; compact as in Arora 2024: m ~ d^2/2."""
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
    """[r cos a_t, r sin a_t], r = relu(x), a_t = pi t / 2M: phi(q_t).phi(k_s) = r.r' cos(a_t - a_s). Qin 2022
    sec. 3.2. M is how many positions are known. It is chosen before training; more positions are an error."""
    floor = 1e-2

    def __init__(self, n_head, head_dim, M=None):
        super().__init__(n_head, head_dim, max_len=number(M, 1024), feature_dim=2 * head_dim)

    def forward(self, x, side='q', t=0):
        end = t + x.shape[2]
        if end > self.max_len:
            raise ValueError(f'cosformer knows positions up to {self.max_len}, not {end}: train with '
                             '--phi=cosformer:LENGTH')
        a = torch.arange(t, end, device=x.device, dtype=x.dtype)[:, None] * (math.pi / 2 / self.max_len)
        r = x.relu()
        return torch.cat([r * a.cos(), r * a.sin()], -1)

class T2R(FeatureMap):
    """relu(W x + b), with W (H, m, d) learned in each layer and shared by q and k. Kasai 2021 sec. 3.1. m = d
    unless given. The authors' code first divides q by sqrt(d): that is t2r-scaled."""
    floor = 1e-2    # if all features are zero, so is n.q; the authors' code clamps here, too

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
        return (x @ self.weight.mT.to(x.dtype) + self.bias).relu()

class Hedgehog(FeatureMap):
    """[softmax(y), softmax(-y)], y = W x, with W (H, d, d) in each layer, at first the identity. Zhang 2024
    sec. 4, with the softmax over features of its appendix A. Other forms:
    exp      [e^(y - max y), e^(min y - y)]: cannot overflow either, but large keys lose their advantage
    paper    e^(W x + b), the paper's equation 3, d features
    listing  [e^y, e^-y], y = W x + b, with separate W and b for q and for k: the appendix's listing
    4        softmax [y, -y], one softmax over all 8d features, W (H, 4d, d): at first the identity and 3
             random rotations, twice as large"""
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
        if form in ('paper', 'listing'):
            self.bias = nn.Parameter(b)

    def forward(self, x, side='q', t=0):
        W = self.weight.mT.to(x.dtype)
        if self.form == 'paper':
            return (x @ W + self.bias).exp()
        if self.form == 'listing':
            i = 'qk'.index(side)
            y = x @ W[i] + self.bias[i]
            return torch.cat([y, -y], -1).exp()
        y = x @ W
        if self.many:
            return torch.cat([y, -y], -1).softmax(-1)
        if self.form == 'exp':
            return torch.cat([y - y.amax(-1, True), y.amin(-1, True) - y], -1).exp()
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)

class Favor(FeatureMap):
    """FAVOR+: e^(-|x|^2/2) [e^Rx, e^-Rx] / sqrt(2m); E[phi(q).phi(k)] = e^(q.k). Choromanski 2021 sec. 2.3.
    x is first divided by d^(1/4), which makes it softmax's e^(q.k / sqrt(d)). R (m, d), m = d unless given,
    has rows like N(0, I), in orthogonal groups of d. It is redrawn for each training batch and kept in the
    checkpoint."""
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
        # a random direction times the length of a Gaussian vector is a Gaussian vector. QR prefers some
        # signs, so these directions are not quite uniform, but phi has both R and -R, so signs do not matter
        self.R.copy_(directions * torch.randn(m, d, device=self.R.device).norm(dim=-1, keepdim=True))

    def forward(self, x, side='q', t=0):
        x = x / self.head_dim ** 0.25
        y = x @ self.R.mT.to(x.dtype)
        size = x.square().sum(-1, keepdim=True) / 2
        return (torch.cat([y, -y], -1) - size).exp() / math.sqrt(self.feature_dim)

class RFA(Favor):
    """[sin(Wx), cos(Wx)] / sqrt(m), |x| = 1, W = R * sigma, sigma (H, d) learned. Peng 2021 sec. 3.1.
    E[phi(q).phi(k)] = exp(-|sigma (q - k)|^2 / 2), a Gaussian; for a single draw it may be negative. R has
    orthogonal rows, as in FAVOR+; the paper's are independent."""
    positive, like_softmax, floor = False, False, 1e-2

    def __init__(self, n_head, head_dim, m=None):
        super().__init__(n_head, head_dim, m)
        self.sigma = nn.Parameter(torch.ones(n_head, 1, head_dim))

    def forward(self, x, side='q', t=0):
        y = (l2(x) * self.sigma) @ self.R.mT.to(x.dtype)
        return torch.cat([y.sin(), y.cos()], -1) / math.sqrt(len(self.R))

def itself(x):
    return x

def elu1(x):
    """elu(x) + 1, with a single exp: the sum would round to 0 for x < -17 in fp32 and for x < -6 in bf16."""
    return x.relu() + x.clamp(max=0).exp()

FEATURE_MAPS = {  # name: constructor (n_head, head_dim, [arg]) -> module with .feature_dim
    'identity': partial(FeatureMap, f=itself, positive=False, mean=False),      # Mao 2022: no map at all
    'elu': partial(FeatureMap, f=elu1),                                         # Katharopoulos 2020 eq. 7
    'relu': partial(FeatureMap, f=torch.relu, floor=1e-2),
    'silu': partial(FeatureMap, f=F.silu, positive=False, mean=False),          # DeltaNet 2024
    'exp': Exp, 't2r': T2R, 't2r-scaled': partial(T2R, scaled=True), 'dpfp': DPFP, 'favor': Favor, 'rfa': RFA,
    'hedgehog': Hedgehog, 'taylor': Taylor, 'cosformer': CosFormer,
}

def feature_map(spec, n_head, head_dim):
    """'dpfp:3' -> FEATURE_MAPS['dpfp'](n_head, head_dim, '3'). Raises ValueError that names the choices."""
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
    """A line of the table below. Gates come from the layer's input x: beta = beta_max sigmoid(x W), log f =
    -rate dt, dt = softplus(x W + b), and log z likewise. A rate of 1 is f = sigmoid(-(x W + b)). Gates in
    model.py says where they start."""
    about: str                  # the known model
    phi: str = 'identity'       # feature map, if --phi does not name another
    norm: str = 'none'          # normaliser, if --norm does not
    f: str | None = None        # decay along the keys: 'fixed' (by head), 'head' or 'channel' (both learned)
    z: str | None = None        # decay along the values: 'channel'
    write: str | None = None    # None is 1; 'beta', one per head; 'channel'; '1-f'; 'dt', the softplus of f
    erase: str | None = None    # 'write': e = w; 'channel': a beta of its own for each channel
    rate: float | None = 1.0    # None: learned, one per head
    keeps: str | None = None    # the state is rows (k, v) instead of S: 'all', or a policy's name
    form: Callable | None = None    # for a rule that the equation does not cover: a function with recurrent's
                                # signature, which is then always used instead of recurrent

    @property
    def matrix(self):
        """Whether the state is a matrix."""
        return self.keeps is None

    @property
    def bounded(self):
        """Whether the state is a list of keys and values that does not grow."""
        return self.keeps not in (None, 'all')

RULES = {
    'sum': Rule('linear transformer, Katharopoulos 2020; T2R, Performer, Hedgehog by phi', 'elu', 'attn'),
    'gated': Rule('RFA-gate, Peng 2021', 'rfa', 'attn', f='head', write='1-f'),
    'delta': Rule('fast weight programmer, Schlag 2021; DeltaNet', 'silu', 'l2', write='beta', erase='write'),
    'decay': Rule('decaying fast weights, Mao 2022', f='channel', z='channel'),
    'retention': Rule('RetNet, Sun 2023', f='fixed'),
    'gla': Rule('gated linear attention, Yang 2023', f='channel', rate=1 / 16),
    'gla-beta': Rule('GLA as a weighted average, with a weight for each value', 'hedgehog', 'attn',
                     f='channel', write='beta', rate=1 / 16),
    'mamba2': Rule('Mamba-2, Dao 2024: a longer step dt writes more and forgets more', 'silu', f='head',
                   write='dt', rate=None),
    'gated_delta': Rule('gated DeltaNet, 2024', 'silu', 'l2', f='head', write='beta', erase='write',
                        rate=None),
    'kda': Rule('Kimi delta attention', 'silu', 'l2', f='channel', write='beta', erase='write', rate=None),
    'gdn2': Rule('gated DeltaNet-2, 2026: each gate by channel', 'silu', 'l2', f='channel', write='channel',
                 erase='channel', rate=None),
    'softmax': Rule('the transformer; its state grows with every token', keeps='all'),
    'window': Rule('softmax over the last `cache` tokens and its own', keeps='window'),
    'sink': Rule('window and the first tokens, Xiao 2023 (StreamingLLM)', keeps='sink'),
    'h2o': Rule('the most attended tokens so far and the last ones, half each, Zhang 2023', keeps='h2o'),
    'tova': Rule('keeps the tokens that the last one attends to most, Oren 2024', keeps='tova'),
    'tova-head': Rule('the same, each head for itself', keeps='tova-head'),
    'random': Rule('evicts by a fixed hash of position and time: the control', keeps='random'),
}

if __name__ == '__main__':
    print(__doc__.partition('name  ')[0])
