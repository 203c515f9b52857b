"""Fast weights: every update rule and feature map of this project, as settings of one recurrence.

A transformer layer that remembers in a matrix instead of a list: the key says where to write, the value what,
the query where to read. The matrix S is small, of fixed size: a model of such layers is an RNN. Per head:

    D_t = (z_t f_t^T) * S_{t-1}                             forget   (* elementwise, z f^T an outer product)
    S_t = D_t + (w_t v_t - e_t D_t k_t) k_t^T               write w_t v_t, erase what the key already recalls
    o_t = S_t q_t                                           read, after the write

Below are this equation (`recurrent`: the definition; `chunked`: the same in matrix products), the state that
is a list after all (`softmax`, and `bounded`, which keeps some rows of it), what is done to q and k before
(`FEATURE_MAPS`, `NORMALISERS`), the gates f, z, w, e of each rule (`RULES`), and one of each put together
(`FastWeights`). Read from top to bottom; there is nothing else.

name          shape           meaning                         the papers' letter
B H T         sizes           batch, heads, time steps
K V C         sizes           features of q, k; of v; chunk   d_dot, d_value (Schlag), k (Kasai), 2m (FAVOR+)
q k           (B, H, T, K)    query, key, after the map phi   phi(q), phi(k)
v             (B, H, T, V)    value
S             (B, H, V, K)    fast weights: the state         W (Schlag), S (Katharopoulos, Mao, Kasai)
n             (B, H, K)       sum of the keys, last row of S  z (Katharopoulos, Schlag, Kasai)
write, erase  (B, H, T)       w_t, e_t                        beta (Schlag), 1 - g (Peng)
log_f         (B, H, T, K|1)  log decay along the keys, <= 0  log of sigma(f_key) (Mao), g (Peng), alpha (GLA)
log_z         (B, H, T, V|1)  log decay along the values      log sigma(f) (Mao)
o             (B, H, T, V)    what is read                    y
u             (B, H, T, V)    pseudo-value: what S receives   beta (v - v_bar) (Schlag)

Sources: Katharopoulos 2020 (arXiv:2006.16236), Peng 2021 RFA (2103.02143), Schlag 2021 (2102.11174), Kasai
2021 T2R (2103.13076), Choromanski 2021 FAVOR+ (2009.14794), Mao 2022 (2210.04243), Zhang 2024 Hedgehog
(2402.04347); beyond them Qin 2022 cosFormer (2202.08791), Sun 2023 RetNet (2307.08621), Yang 2023 GLA
(2312.06635), Arora 2024 Based (2402.18668), Yang 2024 DeltaNet (2406.06484) and gated DeltaNet (2412.06464),
Kimi 2025 KDA (2510.26692). Bounded rows: Oren 2024 TOVA (2401.06104), Zhang 2023 H2O (2306.14048), Xiao 2023
StreamingLLM (2309.17453).
"""
import math
from contextlib import nullcontext
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

LOG_MIN = -5.0  # part of the definition: no log-decay is below this, in any form. exp(-5) a step forgets all
#                 but 0.7 %, and 16 steps of it stay far inside fp32 (see `score`); else exp() would overflow
FLOOR = 1e-6    # smallest denominator of `normalise`; maps with features that can all be 0 ask for 1e-2


def each(f, *xs):
    """f of every x that is there: gates that are None stay None."""
    return [None if x is None else f(x) for x in xs]


# ---- the recurrence, as it is defined ----------------------------------------------------------------------
def start(q, k, v, write, erase, log_f, log_z, S, normalise, cast=True):
    """What all forms do first: fp32 (fp64 stays), decays clamped, v extended by the constant 1, S_0 = 0."""
    if normalise and (erase is not None or (log_z is not None and log_z.shape[-1] > 1)):
        raise ValueError('normalise: one denominator n.q serves all value channels only while they share '
                         'their weights, so it goes neither with erase nor with a vector log_z')
    dtype = torch.promote_types(v.dtype, torch.float32)
    w, e, f, z, S = each(lambda x: x.to(dtype), write, erase, log_f, log_z, S)
    q, k, v = each(lambda x: x.to(dtype), q, k, v) if cast else (q, k, v)
    f, z = each(lambda x: x.clamp(min=LOG_MIN), f, z)
    if normalise:  # S = [S; n]: a value that is always 1 makes the last row of S the sum of the keys
        v = F.pad(v, (0, 1), value=1.0)
    if S is None:
        S = v.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1], dtype=dtype)
    return q, k, v, w, e, f, z, S


def finish(o, normalise, dtype):
    """Divide by n_t . q_t: clamped from below, never shifted (a shift would bias every output)."""
    if normalise:
        o = o[..., :-1] / o[..., -1:].clamp(min=FLOOR if normalise is True else normalise)
    return o.to(dtype)


def step(q, k, v, w, e, f, z, S):
    """The equation: rows q, k, f (N, 1, K)  v, z (N, 1, V)  w, e (N, 1, 1), S (N, V, K) -> o (N, 1, V), S"""
    if f is not None:
        S = S * f
    if z is not None:
        S = S * z.mT
    u = v if w is None else w * v
    if e is not None:
        u = u - e * torch.bmm(k, S.mT)      # minus what S recalls for this key
    S = S.addcmul(u.mT, k)                  # S + u k^T: a rank-one write
    return torch.bmm(q, S.mT), S


def recurrent(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False):
    """The definition: one `step` after the other. O(T V K) time, O(V K) memory.

        D_t = (z_t f_t^T) * S_{t-1}    u_t = w_t v_t - e_t D_t k_t    S_t = D_t + u_t k_t^T    o_t = S_t q_t

    q, k (B, H, T, K)   v (B, H, T, V)   write, erase (B, H, T)   log_f (B, H, T, K|1)   log_z (B, H, T, V|1)
    S (B, H, V, K), with `normalise` (B, H, V + 1, K)  ->  o (B, H, T, V), last S (fp32; fp64 for fp64 inputs)
    None leaves a gate out: w = 1, e = 0, f = z = 1, S = 0. Log-decays are clamped at LOG_MIN = -5 a step.
    normalise: the floor in o_t / max(n_t . q_t, floor), or True for 1e-6. Katharopoulos 2020 sec. 3.2.
    Raises ValueError for normalise with erase or a vector log_z: their value channels share no denominator.
    From Schlag 2021 sec. 4.2 (w = e = beta), Mao 2022 (f, z), Peng 2021 (f = g, w = 1-g), KDA (f, w = e)."""
    dtype, (B, H, T, _), o = v.dtype, q.shape, []
    q, k, v, w, e, log_f, log_z, S = start(q, k, v, write, erase, log_f, log_z, S, normalise)
    f, z = each(torch.exp, log_f, log_z)
    rows, S = (q, k, v, w, e, f, z), S.flatten(0, 1)
    for row in zip(*(repeat(x) if x is None else x.reshape(B * H, 1, T, -1).unbind(2) for x in rows)):
        o_t, S = step(*row, S)
        o.append(o_t)
    return finish(torch.cat(o, 1).view(B, H, T, -1), normalise, dtype), S.view(B, H, *S.shape[1:])


# ---- the same in matrix products ---------------------------------------------------------------------------
# Inside a chunk of C steps a_t, c_t are the running sums of log f and log z, F = exp a, Z = exp c. Unrolling
# the definition from the state S_0 at the chunk's start gives, for s <= t (and s < t for B):
#
#   1. A_ts = sum_d q_td e^(a_td - a_sd) k_sd    B_ts: k_t for q_t         what query / key t finds at key s
#   2. u_t = w_t v_t - e_t (Z_t S_0 (F_t k_t) + sum_{s<t} B_ts e^(c_t-c_s) u_s)   what step t really writes
#   3. o_t = Z_t S_0 (F_t q_t) + sum_{s<=t} A_ts e^(c_t-c_s) u_s                  what query t reads
#   4. S_C = (Z_C F_C^T) * S_0 + sum_s (e^(c_C-c_s) u_s) (e^(a_C-a_s) k_s)^T      the state at the chunk's end
#
# Line 2 is a triangular system (I + diag(e) B) U = ..., one C x C matrix for all channels of v (DeltaNet 2024
# sec. 3). All decays go through two primitives: `score` on the key side, `trimm` on the value side. Over a
# chunk, e^(a_t) may be 0 and e^(-a_s) infinite, so both work in blocks of 16: left of the diagonal, exponents
# count from the row block's first step and are <= 0; on it, from the middle, where |exponent| <= 8 * 5 = 40.
BLOCK = 16


def gamma(g, C, like):
    """(..., C, C): e^(g_t - g_s) for s <= t, else 0, from running sums g (..., C, 1); None is no decay."""
    causal = like.new_ones(C, C).tril()
    return causal if g is None else (g - g.mT).masked_fill(causal == 0, -math.inf).exp()  # after exp: inf * 0


def blocks(g, C):
    """Rows r of each block, the rows before it, and the running sums g at the middle and start of r."""
    for i in range(0, C, BLOCK):
        yield slice(i, i + BLOCK), slice(i), g[..., min(i + BLOCK // 2, C - 1), None, :], g[..., i, None, :]


def score(x, y, a):
    """A_ts = sum_d x_td e^(a_td - a_sd) y_sd for s <= t, else 0. x, y (..., C, K)  a (..., C, K|1) or None"""
    C, rows = x.shape[-2], []
    if a is None or a.shape[-1] == 1:
        return (x @ y.mT) * gamma(a, C, x)
    for r, past, m, n in blocks(a, C):
        x_r, y_r, a_r, y_p, a_p = x[..., r, :], y[..., r, :], a[..., r, :], y[..., past, :], a[..., past, :]
        near = ((x_r * (a_r - m).exp()) @ (y_r * (m - a_r).exp()).mT).tril()
        far = (x_r * (a_r - n).exp()) @ (y_p * (n - a_p).exp()).mT
        rows.append(F.pad(torch.cat([far, near], -1), (0, C - past.stop - near.shape[-1])))
    return torch.cat(rows, -2)


def trimm(L, x, c):
    """y_t = sum_{s<=t} L_ts e^(c_t-c_s) * x_s. L (..., C, C) tril  x (..., C, V)  c (..., C, V|1) or None"""
    C, rows = x.shape[-2], []
    if c is None or c.shape[-1] == 1:
        return (L if c is None else L * gamma(c, C, x)) @ x
    for r, past, m, n in blocks(c, C):
        x_r, c_r, x_p, c_p = x[..., r, :], c[..., r, :], x[..., past, :], c[..., past, :]
        near = (c_r - m).exp() * (L[..., r, r] @ (x_r * (m - c_r).exp()))
        far = (c_r - n).exp() * (L[..., r, past] @ (x_p * (n - c_p).exp()))
        rows.append(near + far)
    return torch.cat(rows, -2)


def chunked(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, chunk=64):
    """`recurrent` in matrix products, with a state between chunks: same arguments, same results, any T and C.
    O(T (C (K + V) + K V)) time. Short chunks cost less arithmetic, long ones fewer and larger products."""
    dtype, o = v.dtype, []
    q, k, v, write, erase, log_f, log_z, S = start(q, k, v, write, erase, log_f, log_z, S, normalise)
    for i in range(0, q.shape[2], chunk):
        Q, X, U, w, e, a, c = each(lambda x: x[:, :, i:i + chunk], q, k, v, write, erase, log_f, log_z)
        a, c = each(lambda x: x.cumsum(2), a, c)
        times_F, times_Z = ((lambda y: y) if x is None else x.exp().mul for x in (a, c))
        if w is not None:
            U = w[..., None] * U
        if e is not None:                                                    # line 2
            eB, recalled = e[..., None] * score(X, X, a), e[..., None] * (times_F(X) @ S.mT)
            solve = lambda y: torch.linalg.solve_triangular(eB, y, upper=False, unitriangular=True)
            if c is None:                                                    # only s < t of eB is looked at
                U = solve(U - recalled)
            else:                                                            # z differs by channel
                M = solve(torch.eye(X.shape[2], dtype=X.dtype, device=X.device).expand_as(eB))
                U = trimm(M, U, c) - times_Z(M @ recalled)
        o.append(times_Z(times_F(Q) @ S.mT) + trimm(score(Q, X, a), U, c))   # line 3
        if c is not None:                                                    # line 4
            S, U = S * c[:, :, -1:].mT.exp(), U * (c[:, :, -1:] - c).exp()
        if a is not None:
            S, X = S * a[:, :, -1:].exp(), X * (a[:, :, -1:] - a).exp()
        S = S + U.mT @ X
    return finish(torch.cat(o, 2), normalise, dtype), S


# ---- the other kind of state: a list of rows ---------------------------------------------------------------
def rope(x, pos, theta=1e4):
    """Turn pairs (x_i, x_{i+d/2}) by pos theta^(-2i/d), arXiv:2104.09864. x (B, H, T, d)  pos (.., T)"""
    d = x.shape[-1] // 2
    angle = pos[..., None] * theta ** (-torch.arange(d, device=x.device, dtype=torch.float32) / d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :d], x[..., d:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def softmax(q, k, v, S=None):
    """Softmax attention under the same interface: its state S is all keys and values so far, and it grows.
    q, k, v (B, H, T, d)   S None or (2, B, H, T0, d)   ->   o (B, H, T, d), S (2, B, H, T0 + T, d)"""
    S = torch.stack([k, v]) if S is None else torch.cat([S, torch.stack([k, v])], 3)
    T, T_all = q.shape[2], S.shape[3]
    mask = None if T in (1, T_all) else q.new_ones(T, T_all, dtype=torch.bool).tril(T_all - T)
    return F.scaled_dot_product_attention(q, *S, attn_mask=mask, is_causal=T == T_all > 1), S


# A transformer is an RNN whose state is a set of rows (k, v) that grows. Keep at most `cache` of them, and it
# is a finite one (Oren 2024 sec. 3): a step sees the rows kept so far and its own, then the row of the least
# score goes; of equals the oldest. a: the attention each row gets from this step, total: from all steps since
# it came, both by head; pos: its position, t: this step's. All (B, H, rows), in no order.
POLICIES = {
    'window': lambda a, total, pos, t, cache, sinks: (pos - t).float(),
    'sink': lambda a, total, pos, t, cache, sinks: (pos - t).float().masked_fill(pos < sinks, math.inf),
    'h2o': lambda a, total, pos, t, cache, sinks: total.masked_fill(pos > t - cache // 2, math.inf),
    'tova': lambda a, total, pos, t, cache, sinks: a.mean(1, keepdim=True).expand_as(a),
    'tova-head': lambda a, total, pos, t, cache, sinks: a,
    'random': lambda a, total, pos, t, cache, sinks: ((pos * 40503 + t * 30011) % 65537).float(),
}
FORESEEN = 'window', 'sink'     # positions alone decide, and no later row goes before an earlier one
NEVER = -1e30                   # a score that softmax makes 0; -inf would make NaN where no row is left


def bounded(q, k, v, S, t, policy, cache, sinks=0, spill=False, compress=0):
    """Softmax over at most `cache` rows; what goes is said by POLICIES. Any T: equal to one step at a time,
    but at once where it is known before what goes (FORESEEN), or as long as nothing goes. test_all.py has the
    definition in lists, by_the_book.
    q, k, v (B, H, T, d)   t position of the first   S None or what was returned: k, v (B, H, cache, d), pos,
    total (B, H, cache), where pos is -1 for rows to come   spill: a row goes before the step reads, not after
    compress: rope's theta; keys come without rope and are turned here, by positions where gaps g > 10 count
    ln ln g (Oren 2024 app.)
    ->  o (B, H, T, d), log of the denominators (B, H, T, 1), the rows that went: k, v (B, H, T, d) and
    whether there was one (B, H, T), S"""
    (B, H, T, d), foreseen, wide = q.shape, policy in FORESEEN, torch.promote_types(q.dtype, torch.float32)
    pos, steps = (t + torch.arange(T, device=q.device)).expand(B, H, T), torch.arange(T, device=q.device)
    fresh = S is None and T <= cache and not spill and not compress
    if S is None:
        S = dict(k=k.new_zeros(B, H, cache, d), v=v.new_zeros(B, H, cache, d),
                 pos=pos.new_full((B, H, cache), -1), total=k.new_zeros(B, H, cache, dtype=wide))
    if T > 1 and not (foreseen and not compress):               # at once until rows go, then step by step
        free = min(T, int((S['pos'][0, 0] < 0).sum()))
        if free < T:
            parts, cuts = [], [0] * (free > 0) + [*range(free, T + 1)]
            for i, j in zip(cuts, cuts[1:]):
                qkv = (x[:, :, i:j] for x in (q, k, v))
                *part, S = bounded(*qkv, S, t + i, policy, cache, sinks, spill, compress)
                parts.append(part)
            return *(torch.cat(x, 2) for x in zip(*parts)), S
    at, total = torch.cat([S['pos'], pos], 2), torch.cat([S['total'], k.new_zeros(B, H, T, dtype=wide)], 2)
    real, keys, turned = at >= 0, (S['k'], k), q
    if compress:
        in_order, order = at.sort()
        gap = in_order.diff(dim=-1, prepend=in_order[..., :1]).to(wide)
        near = torch.where(gap <= 10, gap, gap.clamp(min=3).log().log()).cumsum(-1)
        old, new = torch.zeros_like(near).scatter(-1, order, near).split([cache, T], -1)
        keys, turned = (rope(S['k'], old, compress), rope(k, new, compress)), rope(q, new, compress)
    seen = real[:, :, None] & (torch.arange(cache + T, device=q.device) <= cache + steps[:, None])
    scores = torch.cat([turned @ x.mT for x in keys], -1).to(wide) * d ** -0.5          # (B, H, T, cache + T)
    scores = scores.masked_fill(~seen, NEVER)
    a = scores if foreseen else scores.softmax(-1)
    total = total if foreseen else total + a.sum(2)
    worth = POLICIES[policy](a[:, :, -1], total, at, t + T - 1, cache, sinks)
    worth, one = worth.masked_fill(~real, -math.inf), T == 1 and cache > 0      # rows to come go first
    if one:
        gone = at.masked_fill(worth > worth.amin(-1, keepdim=True), 2 ** 62).argmin(-1, keepdim=True)
    else:                       # positions alone decide, or only rows to come go: no ties
        gone, kept = worth.argsort(-1).split([T, cache], -1)
    if foreseen or spill:
        leaves = torch.full_like(at, T).scatter(-1, gone, steps.expand_as(gone))        # the step it goes at
        scores = scores.masked_fill(leaves[:, :, None] < steps[:, None] + int(spill), NEVER)
        a = scores.softmax(-1)
    a = a.to(v.dtype)
    o = softmax(q, k, v)[0] if fresh else a[..., :cache] @ S['v'] + a[..., cache:] @ v  # fresh: to the bit

    like = lambda i, x: i if x.dim() == 3 else i[..., None].expand(*i.shape, d)
    take = lambda x, i: x.gather(2, like(i, x))
    rows = dict(k=(S['k'], k), v=(S['v'], v), pos=(S['pos'], pos), total=total.split([cache, T], -1))
    if one:                     # the new row takes the place of the one that goes, unless it goes itself
        place, stays = gone.clamp(max=cache - 1), gone < cache
        S, went = {}, {}
        for name, (old, new) in rows.items():
            out, yes = take(old, place), like(stays, old)
            S[name] = old.scatter(2, like(place, old), torch.where(yes, new, out))
            went[name] = torch.where(yes, out, new)
    else:
        rows = {name: torch.cat(x, 2) for name, x in rows.items()}
        S, went = ({name: take(x, i) for name, x in rows.items()} for i in (kept, gone))
    return o, scores.logsumexp(-1, keepdim=True), went['k'], went['v'], went['pos'] >= 0, S


# ---- feature maps phi: (B, H, T, head_dim) -> (B, H, T, feature_dim), the same for q and k -----------------
class FeatureMap(nn.Module):
    """phi, elementwise unless a subclass says otherwise. `arg` is what may follow a colon: --phi=dpfp:3.

    positive  no feature is ever negative, so `sum` may divide by their sum
    kernel    phi(q).phi(k) is a similarity >= 0, so `attn` may divide by n.q; floor: the least denominator
    temper    q and k come divided by head_dim^(1/4): the map stands for exp(q.k), not exp(q.k / sqrt(d))
    exp       phi(q).phi(k) stands for exp(q.k / sqrt(d)), softmax's kernel, or can learn to
    max_len   positions are known up to here; forward takes the position t of x's first row"""
    positive, kernel, floor, temper, exp, max_len = True, True, FLOOR, False, False, None

    def __init__(self, n_head, head_dim, f=None, **traits):
        super().__init__()
        self.feature_dim, self.f = head_dim, f
        self.__dict__.update(traits)

    def forward(self, x, t=0):
        return self.f(x)


def number(arg, kind=int):
    """What follows the colon, as a number above 0."""
    try:
        value = kind(arg)
    except ValueError:
        value = 0
    if not 0 < value < math.inf:
        raise ValueError(f'expected {dict(int="a whole number", float="a number")[kind.__name__]} above 0')
    return value


def elementwise(f, **traits):
    return lambda n_head, head_dim: FeatureMap(n_head, head_dim, f, **traits)


class Exp(FeatureMap):
    """exp(t x), t the temperature. Zhang 2024 sec. 3: t = 2 is spiky enough to recall, 1 is not. arg: t."""
    def __init__(self, n_head, head_dim, arg=1.0):
        temperature = number(arg, float)
        super().__init__(n_head, head_dim, lambda x: (temperature * x).exp())


class T2R(FeatureMap):
    """relu(W x + b), W (H, m, d) learned in each layer, shared by q and k. Kasai 2021 sec. 3.1. arg: m."""
    floor = 1e-2    # all features can be zero, and n.q then is; the authors' code clamps here

    def __init__(self, n_head, head_dim, arg=None):
        m = number(arg or head_dim)
        super().__init__(n_head, head_dim, feature_dim=m)
        self.weight = nn.Parameter(torch.empty(n_head, m, head_dim))
        self.bias = nn.Parameter(torch.zeros(n_head, 1, m))
        r = math.sqrt(6 / (m + head_dim))
        nn.init.uniform_(self.weight, -r, r)    # Xavier

    def forward(self, x, t=0):
        return (x @ self.weight.mT.to(x.dtype) + self.bias).relu()


class DPFP(FeatureMap):
    """r_i r_{i+j}, r = relu([x; -x]), i cyclic, j = 1..nu. Schlag 2021 sec. 5.3. arg: nu; m = 2 d nu."""
    floor = 1e-2

    def __init__(self, n_head, head_dim, arg=1):
        super().__init__(n_head, head_dim, nu=number(arg), feature_dim=2 * head_dim * number(arg))
        if not 1 <= self.nu < 2 * head_dim:
            raise ValueError(f'nu counts shifts of 2 x {head_dim} entries: 1..{2 * head_dim - 1}')

    def forward(self, x, t=0):
        r = torch.cat([x, -x], -1).relu()
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.nu + 1)], -1)


class Favor(FeatureMap):
    """FAVOR+: e^(-|x|^2/2)[e^(Rx), e^(-Rx)]/sqrt(2m); E[phi(q).phi(k)] = e^(q.k). Choromanski 2021 sec. 2.3.
    R (m, d) has orthogonal rows, each distributed as N(0, I). Redrawn for every training batch, part of the
    checkpoint, fixed in evaluation. arg: m (default d); the feature size is 2m."""
    temper = exp = True

    def __init__(self, n_head, head_dim, arg=None):
        m = number(arg or head_dim)
        super().__init__(n_head, head_dim, feature_dim=2 * m, m=m, d=head_dim)
        self.register_buffer('R', torch.empty(m, head_dim))
        self.redraw()

    @torch.no_grad()
    def redraw(self):
        n, like = -(-self.m // self.d), dict(device=self.R.device)
        Q = torch.linalg.qr(torch.randn(n, self.d, self.d, **like))[0].mT.reshape(-1, self.d)[:self.m]
        # a random direction times a Gaussian vector's length is a Gaussian vector. QR has habits of sign, so
        # Q is not quite uniform; phi has both R and -R, so signs do not matter
        self.R.copy_(Q * torch.randn(self.m, self.d, **like).norm(dim=-1, keepdim=True))

    def forward(self, x, t=0):
        y = x @ self.R.mT.to(x.dtype)
        return torch.cat([y, -y], -1).sub(x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(2 * self.m)


class RFA(Favor):
    """[sin(Wx), cos(Wx)] / sqrt(m), |x| = 1, W = R * sigma, sigma (H, d) learned. Peng 2021 sec. 3.1. arg: m.
    E[phi(q).phi(k)] = exp(-|sigma (q - k)|^2 / 2), a Gaussian kernel. R is redrawn as in FAVOR+."""
    temper = exp = positive = False
    floor = 1e-2    # sines and cosines can sum to less than zero, the kernel they stand for cannot

    def __init__(self, n_head, head_dim, arg=None):
        super().__init__(n_head, head_dim, arg)
        self.sigma = nn.Parameter(torch.ones(n_head, 1, head_dim))

    def forward(self, x, t=0):
        y = (l2(x) * self.sigma) @ self.R.mT.to(x.dtype)
        return torch.cat([y.sin(), y.cos()], -1) / math.sqrt(self.m)


class Hedgehog(FeatureMap):
    """[softmax(W x), softmax(-W x)], W (H, d, d) in each layer, at first the identity. Zhang 2024 sec. 4.
    arg 'exp': [exp(y - max y), exp(min y - y)], y = W x. Shared by q and k, as in the paper's equations."""
    exp = True

    def __init__(self, n_head, head_dim, arg='softmax'):
        super().__init__(n_head, head_dim, form=arg, feature_dim=2 * head_dim)
        if arg not in ('softmax', 'exp'):
            raise ValueError('the forms are hedgehog:softmax and hedgehog:exp')
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(n_head, 1, 1))

    def forward(self, x, t=0):
        y = x @ self.weight.mT.to(x.dtype)
        if self.form == 'softmax':
            return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
        return torch.cat([(y - y.amax(-1, True)).exp(), (y.amin(-1, True) - y).exp()], -1)


class Taylor(FeatureMap):
    """[1, x / d^(1/4), x_i x_j / sqrt(d) (i < j), x_i^2 / sqrt(2d)]: phi(q).phi(k) = 1 + s + s^2/2 >= 1/2,
    s = q.k / sqrt(d), the series of softmax's e^s. Zhang 2024 sec. 3; compact as in Arora 2024: m ~ d^2/2."""
    positive, exp = False, True

    def __init__(self, n_head, head_dim):
        super().__init__(n_head, head_dim, feature_dim=(head_dim + 1) * (head_dim + 2) // 2, d=head_dim)
        for name, index in zip('ij', torch.tril_indices(head_dim, head_dim)):
            self.register_buffer(name, index, persistent=False)

    def forward(self, x, t=0):
        c = torch.where(self.i == self.j, 0.5, 1.0).to(x.dtype).sqrt() / math.sqrt(self.d)
        squares = x[..., self.i] * x[..., self.j] * c
        return torch.cat([torch.ones_like(x[..., :1]), x / self.d ** 0.25, squares], -1)


class CosFormer(FeatureMap):
    """[r cos a_t, r sin a_t], r = relu(x), a_t = pi t / 2M: phi(q_t).phi(k_s) = r.r' cos(a_t - a_s).
    Qin 2022 sec. 3.2. arg: M, the length up to which positions are known: chosen before, an error beyond."""
    floor = 1e-2

    def __init__(self, n_head, head_dim, arg=1024):
        super().__init__(n_head, head_dim, max_len=number(arg), feature_dim=2 * head_dim)

    def forward(self, x, t=0):
        T, M = x.shape[2], self.max_len
        if t + T > M:
            raise ValueError(f'cosformer knows positions up to {M}, not {t + T}: its features depend on a '
                             'length that is fixed before training (--phi=cosformer:LENGTH)')
        a = (t + torch.arange(T, device=x.device, dtype=x.dtype))[:, None] * (math.pi / 2 / M)
        return torch.cat([x.relu() * a.cos(), x.relu() * a.sin()], -1)


def elu1(x):
    """elu(x) + 1 as one exp: the sum would round to 0 for x < -17 in fp32, for x < -6 in bf16."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


FEATURE_MAPS = {  # name: constructor (n_head, head_dim, [arg]) -> module with .feature_dim
    'identity': elementwise(lambda x: x, positive=False, kernel=False),       # Mao 2022: no map at all
    'elu': elementwise(elu1),                                                 # Katharopoulos 2020 eq. 7
    'relu': elementwise(torch.relu, floor=1e-2),
    'silu': elementwise(F.silu, positive=False, kernel=False),                # DeltaNet 2024
    'exp': Exp, 't2r': T2R, 'dpfp': DPFP, 'favor': Favor, 'rfa': RFA, 'hedgehog': Hedgehog, 'taylor': Taylor,
    'cosformer': CosFormer,
}


def feature_map(spec, n_head, head_dim):
    """'dpfp:3' -> FEATURE_MAPS['dpfp'](n_head, head_dim, '3'). Raises ValueError that names the choices."""
    name, colon, arg = spec.partition(':')
    if name not in FEATURE_MAPS:
        raise ValueError(f'phi={spec}: no such feature map; choose from {", ".join(FEATURE_MAPS)}')
    try:
        return FEATURE_MAPS[name](n_head, head_dim, *([arg] if colon else []))
    except TypeError:
        raise ValueError(f'phi={spec}: {name} takes nothing after the colon') from None
    except ValueError as e:
        raise ValueError(f'phi={spec}: {e}') from None


# ---- normalisers: what is done to phi(q) and phi(k) --------------------------------------------------------
def l2(x):
    """x / |x|, smooth at 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def sum_to_one(x):
    """x / sum_i x_i, for features >= 0; all zero stays zero. Schlag 2021 sec. 4.2."""
    return x / x.sum(-1, keepdim=True).clamp(min=1e-6)


NORMALISERS = {
    'attn': lambda x: x,    # instead o_t is divided by n_t.q_t: a weighted mean of values. Katharopoulos
                            # 2020; with rules that erase, `sum` as well (FastWeights.delta_attn)
    'sum': sum_to_one,      # Schlag 2021
    'l2': l2,               # DeltaNet 2024
    'none': lambda x: x,    # Mao 2022
}


# ---- rules: which gates there are, and how they follow from the layer's input x ----------------------------
class Rule(NamedTuple):
    """A row of the table. Gates from x: beta = sigmoid(x W), log f = -rate * softplus(x W + b), log z alike.
    With rate 1, f = sigmoid(-(x W + b)). At the start f = 1 - 1/tau, memory lengths tau spread over heads
    or channels from 4 to 512 steps, evenly in log: which distances matter is not known, so cover them all."""
    about: str                  # the known model
    phi: str = 'elu'            # feature map unless the user asks for another
    norm: str = 'attn'          # normaliser, likewise
    f: str | None = None        # decay along the keys: 'fixed' (by head), 'head' or 'channel' (both learned)
    z: str | None = None        # decay along the values: 'channel'
    write: str | None = None    # None is 1; 'beta'; '1-f'
    erase: bool = False         # e = beta
    rate: float | None = 1.0    # None: learned, one a head
    keeps: str | None = None    # the state is a set of rows (k, v): 'all', or the policy that bounds it


RULES = dict(
    sum=Rule('linear transformer, Katharopoulos 2020; T2R, Performer, Hedgehog by their phi'),
    gated=Rule('RFA-gate, Peng 2021', phi='rfa', f='head', write='1-f'),
    delta=Rule('fast weight programmer, Schlag 2021; DeltaNet 2024', 'silu', 'l2', write='beta', erase=True),
    decay=Rule('decaying fast weights, Mao 2022', 'identity', 'none', f='channel', z='channel'),
    retention=Rule('RetNet, Sun 2023', 'identity', 'none', f='fixed'),
    gla=Rule('gated linear attention, Yang 2023', 'identity', 'none', f='channel', rate=1 / 16),
    gated_delta=Rule('gated DeltaNet, Yang 2024', 'silu', 'l2', 'head', None, 'beta', True, rate=None),
    kda=Rule('Kimi delta attention, 2025', 'silu', 'l2', 'channel', None, 'beta', True, rate=None),
    softmax=Rule('the transformer; its state grows with every step', 'identity', 'none', keeps='all'),
    full=Rule('softmax under another name, the control of the following', 'identity', 'none', keeps='all'),
) | {name: Rule(about, 'identity', 'none', keeps=name) for name, about in {
    'window': 'softmax over the last `cache` rows and its own',
    'sink': 'window and the first rows, Xiao 2023 (StreamingLLM)',
    'h2o': 'most attended rows, half of them the last ones, Zhang 2023',
    'tova': 'most attended rows of the last step, Oren 2024',
    'tova-head': 'the same, each head by itself',
    'random': 'a row at random goes: the control',
}.items()}


class Gates(nn.Module):
    """x (B, T, n_embd) -> dict of write, erase, log_f, log_z for `recurrent` and `chunked`, as the rule says.
    beta = beta_max sigmoid(x W); up to 2, I - beta k k^T may have an eigenvalue -1 (Grazzi 2024, 2411.12537).
    GLA and KDA make W low-rank to save parameters; here it is full, as in Mao 2022."""
    def __init__(self, rule, n_embd, n_head, K, V, beta_max=1.0):
        super().__init__()
        self.rule, self.n_head, self.beta_max = rule, n_head, beta_max
        n_f, n_z = {None: 0, 'fixed': 0, 'head': 1, 'channel': K}[rule.f], V if rule.z else 0
        self.sizes = [int(rule.erase or rule.write == 'beta'), n_f, n_z]
        if any(self.sizes):
            self.proj = nn.Linear(n_embd, n_head * sum(self.sizes), bias=False)
        if rule.rate is None:   # Mamba-2's exp(A): log f gets a scale beside its bias, 1 at the start
            self.log_rate = nn.Parameter(torch.zeros(n_head, 1, 1))
        if rule.f == 'fixed':   # RetNet: 1 - 2^-5, 1 - 2^-6, ...
            fixed = torch.log1p(-2.0 ** (-5 - torch.arange(n_head)))
            self.register_buffer('log_fixed', fixed[:, None, None], persistent=False)

        def bias(tau):          # softplus(b) = -log(1 - 1/tau) / rate
            return nn.Parameter((-(1 - 1 / tau).log() / (rule.rate or 1)).expm1().log())
        tau = lambda n: torch.logspace(math.log10(4), math.log10(512), n) if n > 1 else torch.tensor([45.0])
        if n_f:
            self.bias_f = bias(tau(n_head)[:, None, None] if n_f == 1 else tau(n_f).repeat(n_head, 1, 1))
        if n_z:
            self.bias_z = bias(tau(n_z).repeat(n_head, 1, 1))

    def forward(self, x):
        B, T, _ = x.shape
        rule, gates = self.rule, {}
        if any(self.sizes):
            y = self.proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
            beta, f, z = y.to(torch.promote_types(y.dtype, torch.float32)).split(self.sizes, -1)
        rate = self.log_rate.exp() if rule.rate is None else rule.rate
        if rule.f:
            gates['log_f'] = (self.log_fixed.expand(B, -1, T, 1) if rule.f == 'fixed'
                              else -rate * F.softplus(f + self.bias_f))
        if rule.z:
            gates['log_z'] = -rate * F.softplus(z + self.bias_z)
        if self.sizes[0]:
            beta = beta.squeeze(-1).sigmoid()
            gates['write'] = beta if self.beta_max == 1 else self.beta_max * beta
        if rule.write == '1-f':
            gates['write'] = -torch.expm1(gates['log_f'].clamp(min=LOG_MIN)).squeeze(-1)
        if rule.erase:
            gates['erase'] = gates['write']
        return gates


# ---- one of each: a rule, a feature map, a normaliser ------------------------------------------------------
def refusal(rule, phi, norm, beta_max=1.0):
    """Why this combination means nothing, in one sentence, or None. phi is the module, the rest are names."""
    r = RULES[rule]
    if norm == 'attn' and r.z:
        return f'norm=attn with rule={rule}: value channels decay apart, each needs a denominator of its own'
    if norm == 'attn' and r.erase and r.f:
        return f'norm=attn with rule={rule}: erasing and decay leave different sums of keys, no n.q fits both'
    if norm == 'attn' and not phi.kernel:
        return 'norm=attn divides by n.q, which this map can make zero or negative: use a map >= 0 or norm=l2'
    if (norm == 'sum' or norm == 'attn' and r.erase) and not phi.positive:
        return f'norm={norm} divides by the sum of the features, here maybe zero or negative: use norm=l2'
    if norm == 'none' and r.erase:
        return f'rule={rule} with norm=none diverges: the delta rule needs normalised keys, norm=l2 or sum'
    if beta_max != 1 and not r.erase:
        return f'beta_max={beta_max:g} with rule={rule}: only rules that erase have a beta that may exceed 1'


class FastWeights(nn.Module):
    """The heart of a layer: gates from x, map and normaliser on q and k, then the recurrence.
    forward(x, q, k, v, S, t): x (B, T, n_embd)   q, k, v (B, H, T, head_dim)   S what the last call returned
    t the position of the first step (cosformer and bounded rows ask)   form: `recurrent`, `chunked` or a twin
    ->  o (B, H, T, head_dim), S
    Rules that keep rows: cache, sinks, compress as in `bounded`; overflow: 'sum:favor', rule and map by which
    rows that went are written into fast weights."""
    def __init__(self, rule, n_embd, n_head, head_dim, phi=None, norm=None, beta_max=1.0, cache=256, sinks=4,
                 compress=0, overflow=None):
        super().__init__()
        if rule not in RULES:
            raise ValueError(f'rule={rule}: no such rule; choose from {", ".join(RULES)}')
        self.rule, self.overflow = RULES[rule], None
        self.limits = dict(cache=cache, sinks=sinks, compress=compress)
        if overflow:
            name, _, map_ = overflow.partition(':')
            self.overflow = FastWeights(name, n_embd, n_head, head_dim, map_ or 'favor')
            if not self.overflow.phi.exp:
                maps = ', '.join(n for n, f in FEATURE_MAPS.items() if getattr(f, 'exp', False))
                raise ValueError(f'overflow={overflow}: rows and matrix share a denominator, so the map must '
                                 f'stand for exp(q.k / sqrt(d)): {maps}')
            self.log_mass = nn.Parameter(torch.zeros(n_head, 1, 1))     # a map's scale may not be exp's
        if self.rule.keeps and (phi or norm):
            raise ValueError(f'rule={rule} has its own kernel and normaliser: leave out {phi or norm}')
        self.norm = norm or self.rule.norm
        if self.norm not in NORMALISERS:
            raise ValueError(f'norm={norm}: no such normaliser; choose from {", ".join(NORMALISERS)}')
        self.phi = feature_map(phi or self.rule.phi, n_head, head_dim)
        if why := refusal(rule, self.phi, self.norm, beta_max):
            raise ValueError(why)
        self.gates = Gates(self.rule, n_embd, n_head, self.phi.feature_dim, head_dim, beta_max)

    def features(self, q, k, S, t):
        """phi of q and k, in fp32."""
        qk = torch.cat([q, k]).to(torch.promote_types(q.dtype, torch.float32))
        if self.training and S is None and hasattr(self.phi, 'redraw'):
            self.phi.redraw()
        return self.phi(qk * q.shape[-1] ** -0.25 if self.phi.temper else qk, t)

    def forward(self, x, q, k, v, S=None, t=0, form=chunked):
        if self.rule.keeps == 'all':
            return softmax(q, k, v, S)
        device = x.device.type      # features and state are fp32, also where the layers around are bf16
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            if self.rule.keeps:
                return self.keep(x, q, k, v, S or {}, t, form)
            delta_attn, qk = self.norm == 'attn' and self.rule.erase, self.features(q, k, S, t)
            q, k = NORMALISERS['sum' if delta_attn else self.norm](qk).chunk(2)
            gates = self.gates(x)
            if delta_attn:
                return self.delta_attn(q, k, v, gates['write'], S, form)
            return form(q, k, v, **gates, S=S, normalise=self.norm == 'attn' and self.phi.floor)

    def delta_attn(self, q, k, v, beta, S, form):
        """Schlag 2021's ablation: what k_t recalls is divided by n_{t-1}.k_t, what q_t reads by n_t.q_t. n is
        the plain sum of keys: two more calls of the recurrence, v = 1 and no gates. The state is [S; n]."""
        one = torch.ones_like(v[..., :1])
        S, n = (None, None) if S is None else (S[:, :, :-1], S[:, :, -1:])
        nk, _ = form(k, F.pad(k, (0, 0, 1, -1)), one, S=n)   # keys one step late: n_{t-1}
        nq, n = form(q, k, one, S=n)
        o, S = form(q, k, v, beta, beta / nk.squeeze(-1).clamp(min=FLOOR), S=S)
        return (o / nq.clamp(min=FLOOR)).to(v.dtype), torch.cat([S, n], 2)

    def keep(self, x, q, k, v, S, t, form):
        """A bounded set of rows; with `overflow` what goes is written into fast weights, by the gates of the
        step it goes at, and both are read under one denominator: o = (sum e^s v + n v') / (sum e^s + n), over
        the rows, where v' is what the fast weights say and n the mass of the keys they hold, times a learned
        factor e^log_mass."""
        had = {name: S[name] for name in ('k', 'v', 'pos', 'total')} if S else None
        spill = self.overflow is not None
        o, log_rows, *went, S_new = bounded(q, k, v, had, t, self.rule.keeps, **self.limits, spill=spill)
        if spill:
            fast = self.overflow.spilled(x, q, *went, S.get('S'), S.get('n'), form)
            said, mass, S_new['S'], S_new['n'] = fast
            of_rows = (log_rows - mass.clamp(min=1e-30).log() - self.log_mass).sigmoid()
            o = torch.lerp(said, o.to(said.dtype), of_rows).to(v.dtype)
        return o, S_new

    def spilled(self, x, q, k, v, real, S, n, form):
        """What the fast weights say after rows k, v (B, H, T, d) were written where real (B, H, T), and the
        mass of keys behind it (B, H, T, 1), or by value channel. Rules that erase are read as they are, the
        others as a mean: divided by what they would say if all values were 1. -> said, mass, S, n"""
        q, k = self.features(q, k, S, 0).chunk(2)
        v, real, gates = v.to(q.dtype), real.to(q.dtype), self.gates(x)
        one = torch.ones_like(v[..., :1])
        gates['write'] = real * gates.get('write', 1)
        if self.rule.erase:
            mass, n = form(q, k, one, real, log_f=gates.get('log_f'), S=n)
            gates['erase'] = gates['write']
            q, k = NORMALISERS[self.norm](torch.cat([q, k])).chunk(2)
            said, S = form(q, k, v, **gates, S=S)
        else:
            mass, n = form(q, k, torch.ones_like(v) if self.rule.z else one, **gates, S=n)
            said, S = form(q, k, v, **gates, S=S)
            said = said / mass.clamp(min=1e-30)
        return said, mass, S, n
