"""Every fast form and nothing else. Each has its definition elsewhere; test_all.py compares the two.

    o, S = chunked(q, k, v, write, erase, log_f, log_z, S, normalise, floor)     fastweight.chunked, recurrent
    o, S = step(...)                                                             the same for a single step
    o, log_mass, went, rows = bounded(q, k, v, rows, t, policy, cache, ...)      fastweight.bounded
    y = shifted_sum(x, w)    y = relu_squared(x)                                 model.py, under these names
    step = recorded(model, token, state, choose)                                 model.step

Without this file all but bench.py works, and is slower: model.pick_forms imports it.
"""
import contextlib
import functools
import sys
import types
import warnings
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import fastweight
from fastweight import FLOOR, LOG_MIN, append, attend, bounded_step, empty_rows, finish, pick, refuse

try:
    import triton
    import triton.language as tl
except ImportError:         # everything works without; only GPUs are slower
    triton = None
    tl = types.SimpleNamespace(constexpr=None)


# ---- CPU: chunks with a backward by hand -------------------------------------------------------------------
# The four steps of fastweight.chunked, in its letters. What needs no state is done for all chunks at once,
# the states one after the other. A tensor is (N, n, C, .): N = B H sequences of n chunks of C steps. f scales
# channels of keys, the columns of S, and z those of values, its rows; w and e scale steps.
#
#   y = f_up q     r = f_up k     x = f_down k          rows of keys, decays counted from the chunk's middle
#   A = tril(y x^T)    L = e tril(r x^T, -1)    M = (I + L)^-1
#   U = M (z_down w v)    W = -M (f_in e r)             what is written if S = 0, and what S changes about it
#   S' = f_all z_all S + z_all (S W^T) (f_out x) + (z_out U)^T (f_out x)    the chunks one after the other
#   U <- U + z_in (W S^T)                               what is written
#   o = z_up (A U + z_in (y S_in^T))                    S_in = f_in S, what keys meet at the middle
#
# In S' the state is multiplied by P = diag(f_all) + W^T (f_out x), which no state is needed for. The backward
# reads this from bottom to top. dX is the gradient of X; do and dS' are given.
#
#   gradient   shape          equation
#   g          (C, V)         z_up do                              of what is summed up in o
#   dA         (C, C)         tril(g U^T)
#   dS         (V, K)         (z_all dS') P^T + f_in (z_in g)^T y + (z_in A^T g)^T W    the last chunk first
#   dU         (C, V)         A^T g + z_out (f_out x dS'^T)
#   dY         (C, V)         M^T dU                               of Y = (I + L) U; without e, dU
#   E          (C, C)         tril(dY U^T, -1)                     dL is -E
#   G          (C, K)         E x + (z_in dY) S_in                 dr is -e G
#   dx         (C, K)         dA^T y - E^T (e r) + f_out ((z_out U) dS')
#   dq         (C, K)         f_up (dA x + (z_in g) S_in)
#   dk         (C, K)         f_down dx - f_up e G
#   de         (C)            - sum over channels of r * G         * by element
#   dv, dw     (C, V), (C)    w z_down dY, sum over channels of v z_down dY
#   dlog f     (C, K)         q * dq - k * (f_up e G + f_down dx), summed from t to the chunk's end, plus
#                             dS' * S', summed over values
#   dlog z     (C, V)         o * do - v * dv, the same, plus dS' * S', summed over keys
#
# Gates need no chain through the factors: log f_t scales all that a step from t on reads of what was written
# before t, hence reads minus writes, from t to the end (GLA 2023, appendix C). So no factor of the keys meets
# one of the values uncancelled, and a chunk may have 32 steps: at -5 each, f_up and its like are in e^+-80.
# Above the diagonal y x^T, r x^T and g U^T may be infinite then; they are masked before anything is summed.
# Nothing else overflows while q, k, v are below 10^3.
CHUNK = 32      # steps; `on_cpu` says where more or fewer pay


class Factors(NamedTuple):
    """Of log-decays (N, n, C, d) with running sum a, m = a at the chunk's middle; all None without decay."""
    up: torch.Tensor | None = None          # e^(a - m), (N, n, C, d)
    down: torch.Tensor | None = None        # e^(m - a), (N, n, C, d)
    enter: torch.Tensor | None = None       # e^m, (N, n, 1, d)
    leave: torch.Tensor | None = None       # e^(a_C - m), (N, n, 1, d)
    whole: torch.Tensor | None = None       # e^(a_C), (N, n, 1, d)


def factors(log_decay):
    """Log-decays (N, n, C, d), or None -> Factors"""
    if log_decay is None:
        return Factors()
    a = log_decay.cumsum(2)
    m = a[:, :, a.shape[2] // 2, None]
    end = a[:, :, -1:]
    return Factors((a - m).exp(), (m - a).exp(), m.exp(), (end - m).exp(), end.exp())


def times(x, *gates):
    """x * each gate that is there."""
    for y in gates:
        if y is not None:
            x = x * y
    return x


def if_given(f, x):
    """f(x), and None for a gate that is absent."""
    if x is None:
        return None
    return f(x)


def of_chunk(x, j):
    """What belongs to chunk j of x (N, n, ...), of None None."""
    if x is None:
        return None
    return x[:, j]


def turned(x):
    """x^T, of None None."""
    if x is None:
        return None
    return x.mT


def of_gate(reads, kept, size):
    """Gradient of log-decays from reads (N, n, C, d) by step, kept (N, n, 1, d) by chunk. size 1: shared."""
    if size == 1:
        reads = reads.sum(-1, keepdim=True)
        kept = kept.sum(-1, keepdim=True)
    return reads.flip(2).cumsum(2).flip(2) + kept


def inverted(L):
    """(I + L)^-1, L (N, C, C) strictly lower triangular: what is above is not looked at. By halves, which are
    inverted together, since products are faster than a solver that walks through long rows.

        (I + A    0  )^-1  =  (  A'      0 )          A' = (I + A)^-1,   B' = (I + B)^-1
        (  E    I + B)        (-B' E A'  B')"""
    C = L.shape[-1]
    if C <= 16 or C % 2:
        eye = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L)
        return torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    h = C // 2
    E = L[:, h:, :h]
    A, B = inverted(torch.cat([L[:, :h, :h], L[:, h:, h:]])).chunk(2)
    top = F.pad(A, (0, h))
    bottom = torch.cat([-(B @ E @ A), B], 2)
    return torch.cat([top, bottom], 1)


def walk(S, own, f, z, W, x_out, back=False):
    """S' = z_all (f_all S + (S W^T) x_out) + own, the chunks one after the other. S (N, V, K)
    own (N, n, V, K)   W (N, n, C, K), None where nothing is erased   x_out = f_out x (N, n, C, K)
    back: the gradients of the states, from the last chunk to the first
    ->  the S that each chunk meets (N, n, V, K), and the one behind the last"""
    erases = W is not None
    _, n, V, K = own.shape
    order = range(n)
    if back:
        order = reversed(order)
        W, x_out = x_out, W
    f_all = f.whole
    z_all = turned(z.whole)
    P = None
    if erases and K <= V:           # leaves one product a chunk to the loop; of more features P is too large
        P = W.mT @ x_out
        P.diagonal(dim1=2, dim2=3).add_(1.0 if f_all is None else f_all.squeeze(2))
    states = torch.empty_like(own)
    for j in order:
        states[:, j] = S
        S = times(S, of_chunk(z_all, j))
        if P is not None:
            S = torch.baddbmm(own[:, j], S, P[:, j])
        else:
            kept = times(S, of_chunk(f_all, j))
            if erases:
                kept = torch.baddbmm(kept, S @ W[:, j].mT, x_out[:, j])
            S = kept + own[:, j]
    return states, S


class Chunks(torch.autograd.Function):
    """q, k (B, H, T, K)   v (B, H, T, V)   w, e (B, H, T)   log_f (B, H, T, K|1)   log_z (B, H, T, V|1)
    S (B, H, V, K)   T a multiple of C  ->  o (B, H, T, V), S. Gates may be None."""
    @staticmethod
    def forward(ctx, q, k, v, w, e, log_f, log_z, S, C):
        def in_chunks(x):
            return x.reshape(B * H, T // C, C, -1)
        B, H, T, K = q.shape
        V = v.shape[-1]
        steps = q, k, v, w, e, log_f, log_z
        ctx.shapes = [if_given(torch.Tensor.size, x) for x in (*steps, S)]
        q, k, v, w, e, log_f, log_z = (if_given(in_chunks, x) for x in steps)
        f = factors(log_f)
        z = factors(log_z)
        y = times(q, f.up)
        r = times(k, f.up)
        x = times(k, f.down)
        A = (y @ x.mT).tril_()
        U = times(v, w, z.down)
        M = W = None
        if e is not None:
            L = (r @ x.mT).mul_(e)
            M = inverted(L.flatten(0, 1)).view_as(L)
            U = M @ U                                   # still without what keys find in the state
            W = M @ (times(r, f.enter) * -e)
        x_out = times(x, f.leave)
        own = times(U, z.leave).mT @ x_out
        states, S = walk(S.flatten(0, 1), own, f, z, W, x_out)
        if e is not None:
            U += times(W @ states.mT, z.enter)
        S_in = times(states, f.enter)
        o = times(A @ U + times(y @ S_in.mT, z.enter), z.up)
        ctx.save_for_backward(q, k, v, w, e, *f, *z, A, U, M, W, states, S, None if log_z is None else o)
        return o.view(B, H, T, V), S.view(B, H, V, K)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        q, k, v, w, e, *decays, A, U, M, W, states, S, o = ctx.saved_tensors
        f = Factors(*decays[:5])
        z = Factors(*decays[5:])
        y = times(q, f.up)
        r = times(k, f.up)
        x = times(k, f.down)
        S_in = times(states, f.enter)
        do = do.reshape(v.shape)
        g = times(do, z.up)
        g_in = times(g, z.enter)
        dA = (g @ U.mT).tril_()
        dU = A.mT @ g
        read = times(g_in.mT @ y, f.enter)              # dS but for what comes from later chunks
        if e is not None:
            read += times(dU, z.enter).mT @ W
        x_out = times(x, f.leave)
        after, dS = walk(dS.flatten(0, 1), read, f, z, W, x_out, back=True)        # dS' of each chunk, dS
        dU += times(x_out @ after.mT, z.leave)
        dq = times(dA @ x + g_in @ S_in, f.up)
        dx = dA.mT @ y + times(times(U, z.leave) @ after, f.leave)
        dY = dU
        de = dw = dlog_f = dlog_z = None
        if e is not None:
            dY = M.mT @ dU
            E = (dY @ U.mT).tril_(-1)
            G = E @ x + times(dY, z.enter) @ S_in
            de = -(r * G).sum(-1)
            dx -= E.mT @ (e * r)
            looking = times(G, f.up) * -e               # the gradient of k where it looks for what is there
        written = times(dx, f.down)                     # and where it is written
        dk = written
        if e is not None:
            dk = written + looking
            written = written - looking
        dv = times(dY, z.down)
        if w is not None:
            dw = (dv * v).sum(-1)
            dv = dv * w
        if f.up is not None or z.up is not None:
            kept = after                                # becomes dS' S'
            kept[:, :-1] *= states[:, 1:]
            kept[:, -1] *= S
        if f.up is not None:
            dlog_f = of_gate(q * dq - k * written, kept.sum(2)[:, :, None], f.up.shape[-1])
        if z.up is not None:
            dlog_z = of_gate(o * do - v * dv, kept.sum(3)[:, :, None], z.up.shape[-1])
        gradients = []
        for x, shape in zip((dq, dk, dv, dw, de, dlog_f, dlog_z, dS), ctx.shapes):
            if shape is not None:
                x = x.reshape(shape)
            gradients.append(x)
        return *gradients, None


def prepared(q, k, v, write, erase, log_f, log_z, S, normalise):
    """As fastweight.start, but absent gates stay None, so that nothing is computed for them."""
    if normalise:
        refuse(erase, log_z)
        v = F.pad(v, (0, 1), value=1.0)
    dtype = torch.promote_types(v.dtype, torch.float32)
    if log_f is not None:
        log_f = log_f.clamp(min=LOG_MIN)
    if log_z is not None:
        log_z = log_z.clamp(min=LOG_MIN)
    if S is None:
        S = v.new_zeros(q.shape[0], q.shape[1], v.shape[-1], q.shape[-1], dtype=dtype)
    def cast(x):
        if x.dtype == dtype:
            return x                                    # nothing to record
        return x.to(dtype)
    return [if_given(cast, x) for x in (q, k, v, write, erase, log_f, log_z, S)]


def filled(x, rest):
    """x (B, H, T, ...) with so many steps of zeros more, which write and erase nothing."""
    if not rest:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, rest))


def on_cpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR,
           chunk=None):
    """fastweight.chunked through `Chunks`. A chunk has CHUNK steps; twice as many where there are many
    features, since a state costs K V numbers a chunk, and half as many where there are few and the rule
    erases, since an inverse costs C numbers a step. Where something decays it has at most CHUNK."""
    dtype = v.dtype
    T = q.shape[2]
    if chunk is None:
        chunk = CHUNK
        if k.shape[-1] >= 64:
            chunk = 2 * CHUNK
        elif k.shape[-1] <= 16 and erase is not None:
            chunk = CHUNK // 2
    if log_f is not None or log_z is not None:
        chunk = min(chunk, CHUNK)
    chunk = min(chunk, T)
    rest = -T % chunk

    def whole_chunks(x):
        return filled(x, rest)
    *steps, S = prepared(q, k, v, write, erase, log_f, log_z, S, normalise)
    steps = [if_given(whole_chunks, x) for x in steps]
    o, S = Chunks.apply(*steps, S, chunk)
    return finish(o[:, :, :T], normalise, floor, dtype), S


def step_on_cpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False,
                floor=FLOOR, times=torch.Tensor.mul, plus_outer=torch.Tensor.addcmul):
    """fastweight.recurrent for a single step, with nothing computed for absent gates. times, plus_outer: the
    two ways in which S is changed."""
    dtype = v.dtype
    q, k, v, write, erase, log_f, log_z, S = prepared(q, k, v, write, erase, log_f, log_z, S, normalise)
    shape = S.shape
    S = S.flatten(0, 1)                                 # (N, V, K), and rows (N, 1, .)
    k = k.reshape(len(S), 1, -1)
    u = v.reshape(len(S), 1, -1)
    if log_f is not None:
        S = times(S, log_f.reshape(len(S), 1, -1).exp())
    if log_z is not None:
        S = times(S, log_z.reshape(len(S), -1, 1).exp())
    if write is not None:
        u = write.reshape(len(S), 1, 1) * u
    if erase is not None:
        u = torch.baddbmm(u, erase.reshape(len(S), 1, 1) * k, S.mT, alpha=-1)           # u - erase S k
    S = plus_outer(S, u.mT, k)
    o = torch.bmm(q.reshape(len(S), 1, -1), S.mT)
    return finish(o.view(*shape[:2], 1, -1), normalise, floor, dtype), S.view(shape)


# the same, S written over: where it is large, in half the time
step_over = functools.partial(step_on_cpu, times=torch.Tensor.mul_, plus_outer=torch.Tensor.addcmul_)


# ---- GPU: the same letters, in five Triton kernels ---------------------------------------------------------
# A tile is one chunk of one sequence. `inverse` and `tokens` have one program a tile; `forward` and `states`
# one a sequence and block of BV value channels: it walks through the chunks, its part of S in registers.
#
#               chunk 0   chunk 1   ...                           reads                 writes
#   inverse     [ tile ]  [ tile ]  all at once                   k e g f               N (C numbers a token)
#   forward     S -> o    S -> o    ...     one after the other   q k v w e g f z N     o, S, U (VK/C + V)
#   states      dS     <- dS     <- ...     from the last back    q k e g f z N do      dS, dY (the same)
#   tokens      [ tile ]  [ tile ]  all at once                   S dS U dY, not N      the gradients
#   one_step    S -> S, o           a step, not a tile            q k v w e f z S       o, S
#
# Two things differ from the CPU. A log-decay that all channels share is one number g a step: not factors of q
# and k, but e^(a_t - a_s) on A and L, which is never above 1, so that a chunk may be longer. And what a step
# says to itself stands apart, in fp32: of A the diagonal, D = q.k; of M = I + N the ones. Gradients of gates
# are what is read less what is written, where just that must cancel; of strong decays little else is left.
#
#   U = Y + N Y,  Y = z_down w v - e z_in g_in (r S_in^T)         o = z_up (D U + A U + z_in g_in (y S_in^T))
#
# Operands of a product are DT (bf16 or fp32), but in the inverse; sums and states in registers are fp32.
def jit(f):
    if triton is None:
        return f
    return triton.jit(f, do_not_specialize=['T'])


@jit
def operand(x, DT: tl.constexpr):
    """x as a product takes it."""
    return x.to(DT)


@jit
def dot(a, b, DT: tl.constexpr):
    """a b with operands of type DT and sums in fp32. In fp32 three products of tf32 make up for its short
    mantissa: one alone is off in the third digit, which a linear system then multiplies."""
    precision: tl.constexpr = 'tf32x3' if DT == tl.float32 else None
    return tl.dot(operand(a, DT), operand(b, DT), input_precision=precision)


@jit
def load(p, row, col, ok, D: tl.constexpr):
    """Tile [rows, cols] of a (..., D) tensor, in fp32, 0 outside."""
    inside = ok[:, None] & (col < D)[None, :]
    return tl.load(p + row[:, None] * D + col[None, :], inside, 0.0).to(tl.float32)


@jit
def store(p, x, row, col, ok, D: tl.constexpr):
    """The inverse of `load`: x into rows and columns that there are, in the type of p."""
    inside = ok[:, None] & (col < D)[None, :]
    tl.store(p + row[:, None] * D + col[None, :], x.to(p.dtype.element_ty), inside)


@jit
def load_row(p, i, kk, K: tl.constexpr):
    """Row i of a (., K) tensor, [1, BK] in fp32."""
    return tl.load(p + i * K + kk, kk < K, 0.0).to(tl.float32)[None, :]


@jit
def store_row(p, x, i, kk, K: tl.constexpr):
    """The inverse of `load_row`."""
    tl.store(p + i * K + kk[None, :], x.to(p.dtype.element_ty), (kk < K)[None, :])


@jit
def column(p, row, ok, default: tl.constexpr):
    """A number a step, [C, 1]; for None the default, [1, 1], which costs nothing."""
    if p is None:
        return tl.full([1, 1], default, tl.float32)
    else:
        return tl.load(p + row, ok, 0.0).to(tl.float32)[:, None]


@jit
def place(tile, T, C: tl.constexpr):
    """Of a tile: its sequence, its chunk, and of its steps the rows in a (sequences T, .) tensor [C], and
    whether there are such steps: the last chunk may be shorter."""
    n = tl.cdiv(T, C)
    t = tile % n * C + tl.arange(0, C)
    return tile // n, tile % n, tile // n * T + t, t < T


@jit
def lower(x, C: tl.constexpr):
    """x [C, C] below the diagonal, else 0. What is above may be infinite."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] > i[None, :], x, 0.0)


@jit
def decays(p, row, col, ok, D: tl.constexpr, C: tl.constexpr):
    """`factors` of one tile, for a log-decay by channel: e^(a - m), e^(m - a) [C, d]; e^m, e^(a_C - m),
    e^(a_C) [1, d]. Ones [1, 1] for None, for which the compiler leaves out the products."""
    if p is None:
        one = tl.full([1, 1], 1.0, tl.float32)
        return one, one, one, one, one
    else:
        log_p = load(p, row, col, ok, D)
        i = tl.arange(0, C)[:, None]
        a = tl.cumsum(log_p, 0)
        m = tl.sum(tl.where(i <= C // 2, log_p, 0.0), 0)[None, :]
        end = tl.sum(log_p, 0)[None, :]
        return tl.exp(a - m), tl.exp(m - a), tl.exp(m), tl.exp(end - m), tl.exp(end)


@jit
def shared_decay(p, row, ok, C: tl.constexpr):
    """Of a log-decay that all channels share, a its running sum: e^a, e^(a_C - a) [C, 1], e^(a_C), and
    e^(a_t - a_s) [C, C] for s <= t. Ones for None."""
    if p is None:
        one = tl.full([1, 1], 1.0, tl.float32)
        return one, one, one, one
    else:
        log_p = tl.load(p + row, ok, 0.0)
        a = tl.cumsum(log_p, 0)
        end = tl.sum(log_p, 0)
        apart = tl.minimum(a[:, None] - a[None, :], 0.0)
        return tl.exp(a)[:, None], tl.exp(end - a)[:, None], tl.exp(end), tl.exp(apart)


@jit
def letters(q, k, f, within, row, kk, ok, K: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """Of one tile: y, r, x [C, BK]; of A what is below the diagonal [C, C], and D, the diagonal [C, 1];
    and what the state pays on the side of the keys."""
    f_up, f_down, f_in, f_out, f_all = decays(f, row, kk, ok, K, C)
    q_ = load(q, row, kk, ok, K)
    k_ = load(k, row, kk, ok, K)
    y = q_ * f_up
    r = k_ * f_up
    x = k_ * f_down
    A = lower(dot(y, tl.trans(x), DT) * within, C)
    D = tl.sum(q_ * k_, 1)[:, None]
    return y, r, x, A, D, f_in, f_out, f_all


@jit
def joined(M, L, half: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses of the diagonal blocks of size `half`, in M, those of twice the size:
    [[P, 0], [B, R]]^-1 = [[P^-1, 0], [-R^-1 B P^-1, R^-1]]"""
    i = tl.arange(0, C) // half
    B = tl.where((i[:, None] // 2 == i[None, :] // 2) & (i[:, None] > i[None, :]), L, 0.0)
    return M - tl.dot(M, tl.dot(B, M, input_precision=PRECISION), input_precision=PRECISION)


@jit
def unit_inverse(L, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for L [C, C] below the diagonal. First the blocks of 16 on the diagonal, all at once, by
    substitution in fp32: row s of X is row s of I - L X, which needs the rows above s. Then by twos."""
    b = tl.arange(0, C // 16)
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    own = tl.sum(tl.where(diagonal, tl.reshape(L, [C // 16, 16, C // 16, 16]), 0.0), 2)
    X = tl.where((i == j)[None, :, :], 1.0, tl.zeros([C // 16, 16, 16], tl.float32))
    for s in range(1, 16):
        here = (i == s)[None, :, :]
        L_s = tl.sum(tl.where(here, own, 0.0), 1)
        row_s = tl.sum(L_s[:, :, None] * X, 1)
        X -= tl.where(here, row_s[:, None, :], 0.0)
    M = tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), [C, C])
    if C > 16:
        M = joined(M, L, 16, C, PRECISION)
    if C > 32:
        M = joined(M, L, 32, C, PRECISION)
    return M


# for each tile, in parallel:                                   reads k, e, g, f    writes N
#     L = e tril(r x^T, -1)
#     N = (I + L)^-1 - I
@jit
def inverse(k, e, g, f, N, T, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr):
    """N = (I + L)^-1 - I: what later steps of a chunk do to what is written."""
    tile = tl.program_id(0).to(tl.int64)
    seq, j, row, ok = place(tile, T, C)
    i = tl.arange(0, C)
    kk = tl.arange(0, BK)
    f_up, f_down, f_in, f_out, f_all = decays(f, row, kk, ok, K, C)
    g_in, g_out, g_all, within = shared_decay(g, row, ok, C)
    k_ = load(k, row, kk, ok, K)
    L = lower(dot(k_ * f_up, tl.trans(k_ * f_down), DT) * within * column(e, row, ok, 0.0), C)
    M = unit_inverse(L, C, 'tf32x3' if DT == tl.float32 else 'tf32')
    store(N, lower(M, C), tile * C + i, i, i < C, C)


# for each sequence and each block of BV value channels, in parallel:
#     S = S_0                                                   a [BV, BK] part, in registers all the time
#     for each chunk, one after the other:                      reads q, k, v, w, e, g, f, z, N
#         U = Y + N Y, Y = z_down w v - e z_in g_in r S_in^T
#         o = z_up (D U + A U + z_in g_in y S_in^T)             writes o, and S for the backward
#         S = f_all z_all g_all S + (z_out g_out U)^T (f_out x)
# With NORM also n, what S would be for values of 1; then o is divided by n.q.
@jit
def forward(q, k, v, w, e, g, f, z, N, S_0, o, n_q, written, states, S_T, floor, T, K: tl.constexpr,
            V: tl.constexpr, NORM: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DT: tl.constexpr):
    """o of all steps of a sequence, and the state before each chunk and after the last."""
    chunks = tl.cdiv(T, C)
    seq = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    R: tl.constexpr = V + NORM                                  # rows of a state
    S = load(S_0, seq * R + vv, kk, vv < V, K)
    n = load_row(S_0, seq * R + V * NORM, kk, K)                # unless NORM of no use
    for j in range(chunks):
        t = j * C + i
        row = seq * T + t
        ok = t < T
        g_in, g_out, g_all, within = shared_decay(g, row, ok, C)
        z_up, z_down, z_in, z_out, z_all = decays(z, row, vv, ok, V, C)
        y, r, x, A, D, f_in, f_out, f_all = letters(q, k, f, within, row, kk, ok, K, C, DT)
        w_ = column(w, row, ok, 1.0)
        if NORM:
            n_q_ = D * w_ + tl.sum(A * tl.trans(w_), 1)[:, None]        # what the chunk gives, and the past
            n_q_ += tl.sum(y * (n * f_in), 1)[:, None] * g_in
            if states is not None and tl.program_id(1) == 0:
                store_row(states, n, (seq * chunks + j) * R + V, kk, K)
                tl.store(n_q + row[:, None], n_q_, ok[:, None])
            n = n * f_all * g_all + tl.sum(x * f_out * g_out * w_, 0)[None, :]
        U = tl.zeros([C, BV], tl.float32)
        if v is not None:
            U = load(v, row, vv, ok, V) * w_ * z_down
        S_in = tl.trans(S * f_in)
        if states is not None:
            store(states, S, (seq * chunks + j) * R + vv, kk, vv < V, K)
        if e is not None:
            U -= dot(r, S_in, DT) * z_in * g_in * column(e, row, ok, 0.0)
            U += dot(load(N, (seq * chunks + j) * C + i, i, i < C, C), U, DT)
            if states is not None:
                store(written, U, row, vv, ok, V)
        if o is not None:
            o_ = D * U + dot(A, U, DT) + dot(y, S_in, DT) * z_in * g_in
            if NORM:
                o_ = o_ / tl.maximum(n_q_, floor)
            store(o, o_ * z_up, row, vv, ok, V)
        S = S * f_all * tl.trans(z_all) * g_all + dot(tl.trans(U * z_out * g_out), x * f_out, DT)
    store(S_T, S, seq * R + vv, kk, vv < V, K)
    if NORM and tl.program_id(1) == 0:
        store_row(S_T, n, seq * R + V, kk, K)


# for each sequence and each block of BV value channels, in parallel:
#     dS = dS_T
#     for each chunk, the last first:                           reads q, k, e, g, f, z, N, do   writes dS
#         dU = D G + A^T G + z_out g_out (f_out x dS^T), G = z_up do
#         dY = dU + N^T dU
#         dS = f_all z_all g_all dS + f_in ((z_in g_in G)^T y - (e z_in g_in dY)^T r)
@jit
def states(q, k, e, g, f, z, N, do, dn_q, dS_T, d_written, after, dS_0, T, K: tl.constexpr, V: tl.constexpr,
           NORM: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr):
    """The gradient of the state that each chunk hands on, from the last chunk to the first."""
    chunks = tl.cdiv(T, C)
    seq = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    R: tl.constexpr = V + NORM
    dS = load(dS_T, seq * R + vv, kk, vv < V, K)
    dn = load_row(dS_T, seq * R + V * NORM, kk, K)
    for back in range(chunks):
        j = chunks - 1 - back
        t = j * C + i
        row = seq * T + t
        ok = t < T
        g_in, g_out, g_all, within = shared_decay(g, row, ok, C)
        z_up, _, z_in, z_out, z_all = decays(z, row, vv, ok, V, C)
        y, r, x, A, D, f_in, f_out, f_all = letters(q, k, f, within, row, kk, ok, K, C, DT)
        G = load(do, row, vv, ok, V) * z_up
        if after is not None:
            store(after, dS, (seq * chunks + j) * R + vv, kk, vv < V, K)
        read = dot(tl.trans(G * z_in * g_in), y, DT)
        if e is not None:
            dU = D * G + dot(tl.trans(A), G, DT)
            dU += dot(x * f_out, tl.trans(dS), DT) * z_out * g_out
            N_ = load(N, (seq * chunks + j) * C + i, i, i < C, C)
            dY = dU + dot(tl.trans(N_), dU, DT)
            if after is not None:
                store(d_written, dY, row, vv, ok, V)
            read -= dot(tl.trans(dY * z_in * g_in * column(e, row, ok, 0.0)), r, DT)
        dS = dS * f_all * tl.trans(z_all) * g_all + read * f_in
        if NORM:
            if after is not None and tl.program_id(1) == 0:
                store_row(after, dn, (seq * chunks + j) * R + V, kk, K)
            dn = dn * f_all * g_all + tl.sum(column(dn_q, row, ok, 0.0) * g_in * y, 0)[None, :] * f_in
    store(dS_0, dS, seq * R + vv, kk, vv < V, K)
    if NORM and tl.program_id(1) == 0:
        store_row(dS_0, dn, seq * R + V, kk, K)


@jit
def passing(inside, out):
    """What passes the decay of step t: what is read less what is written inside the chunk from t on, and what
    was written before t and leaves it. [C, d] both"""
    return tl.cumsum(inside, 0, reverse=True) + tl.cumsum(out, 0) - out


@jit
def finish_keys(q, k, e, g, f, row, kk, ok, dA, dL, dD, dy, dr, dx_out, kept, dq, dk, de, dg, df,
                K: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """From the sums over all value channels to the gradients of q, k, e, g, f. q and k are loaded again: held
    all the time, they would press others out of the registers."""
    f_up, f_down, f_in, f_out, f_all = decays(f, row, kk, ok, K, C)
    g_in, g_out, g_all, within = shared_decay(g, row, ok, C)
    q_ = load(q, row, kk, ok, K)
    k_ = load(k, row, kk, ok, K)
    y = q_ * f_up
    r = k_ * f_up
    x = k_ * f_down
    dA = lower(dA * within, C)
    dy += dot(dA, x, DT)
    dx = dot(tl.trans(dA), y, DT)
    if e is not None:
        e_ = column(e, row, ok, 0.0)
        dL = lower(dL * within, C)
        dr += dot(dL, x, DT)
        dx += dot(tl.trans(dL * e_), r, DT)
        tl.store(de + row[:, None], tl.sum(r * dr, 1)[:, None], ok[:, None])
        dr = dr * e_
    dx_out = dx_out * f_out
    inside = operand(y, DT) * dy + operand(r, DT) * dr - operand(x, DT) * dx
    if f is not None:
        store(df, passing(inside, x * dx_out) + kept, row, kk, ok, K)
    if g is not None:
        of_g = passing(tl.sum(inside, 1)[:, None], tl.sum(x * dx_out, 1)[:, None]) + tl.sum(kept)
        tl.store(dg + row[:, None], of_g, ok[:, None])
    store(dq, dy * f_up + dD * k_, row, kk, ok, K)
    store(dk, (dx + dx_out) * f_down + dr * f_up + dD * q_, row, kk, ok, K)


# for each tile, in parallel:                                   the table of gradients, row by row
#     for each block of BV value channels:                      reads all, S before and dS behind the chunk
#         dA, dL, dy, dr, dx, dw, de += what these channels say; dv and dz are theirs alone
#     dq, dk, de, dlog g, dlog f from the sums                  writes each gradient once
@jit
def tokens(q, k, v, w, e, g, f, z, do, dn_q, written, d_written, states, after, dq, dk, dv, dw, de, dg, df,
           dz, T, K: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
           BV: tl.constexpr, DT: tl.constexpr):
    """All gradients of the steps of one tile, summed over blocks of value channels: the table above."""
    tile = tl.program_id(0).to(tl.int64)
    seq, j, row, ok = place(tile, T, C)
    kk = tl.arange(0, BK)
    R: tl.constexpr = V + NORM
    g_in, g_out, g_all, within = shared_decay(g, row, ok, C)
    y, r, x, A, D, f_in, f_out, f_all = letters(q, k, f, within, row, kk, ok, K, C, DT)
    w_ = column(w, row, ok, 1.0)
    dA = tl.zeros([C, C], tl.float32)
    dL = tl.zeros([C, C], tl.float32)
    dy = tl.zeros([C, BK], tl.float32)
    dx_out = tl.zeros([C, BK], tl.float32)
    dr = tl.zeros([C, BK], tl.float32)
    dD = tl.zeros([C, 1], tl.float32)
    dw_ = tl.zeros([C, 1], tl.float32)
    kept = tl.zeros([1, BK], tl.float32)
    if NORM:
        dn_q_ = column(dn_q, row, ok, 0.0)
        n = load_row(states, tile * R + V, kk, K)
        dn = load_row(after, tile * R + V, kk, K)
        kept += dn * n * f_all * g_all
        dA += dn_q_ * tl.trans(w_)
        dD += dn_q_ * w_
        dy += dn_q_ * g_in * (n * f_in)
        dx_out += w_ * g_out * dn
        dw_ += D * dn_q_ + tl.sum(A * dn_q_, 0)[:, None]
        dw_ += tl.sum(x * f_out * dn, 1)[:, None] * g_out
    for v_0 in range(0, V, BV):
        vv = v_0 + tl.arange(0, BV)
        z_up, z_down, z_in, z_out, z_all = decays(z, row, vv, ok, V, C)
        v_ = load(v, row, vv, ok, V)
        do_ = load(do, row, vv, ok, V)
        S = load(states, tile * R + vv, kk, vv < V, K)
        S_in = S * f_in
        dS = load(after, tile * R + vv, kk, vv < V, K)
        stays = dS * S * f_all * tl.trans(z_all) * g_all
        kept += tl.sum(stays, 0)[None, :]
        G = do_ * z_up
        Y = v_ * w_ * z_down                                    # of Y what is not erased
        if z is not None or e is None:
            out = dot(x * f_out, tl.trans(dS), DT) * z_out * g_out
        if e is None:
            U = Y
            dY = D * G + dot(tl.trans(A), G, DT) + out
        else:
            U = load(written, row, vv, ok, V)
            dY = load(d_written, row, vv, ok, V)
            dL -= dot(dY, tl.trans(U), DT)
            dr -= dot(dY * z_in * g_in, S_in, DT)
        dA += dot(G, tl.trans(U), DT)
        dD += tl.sum(G * U, 1)[:, None]
        dy += dot(G * z_in * g_in, S_in, DT)
        dx_out += dot(U * z_out * g_out, dS, DT)
        dw_ += tl.sum(dY * z_down * v_, 1)[:, None]
        store(dv, dY * z_down * w_, row, vv, ok, V)
        if z is not None:
            o_ = D * (U - Y) + dot(A, U, DT) + dot(y, tl.trans(S_in), DT) * z_in * g_in
            inside = G * o_ - Y * (dY - D * G - out)
            later = tl.sum((U - Y) * out, 0) + tl.sum(stays, 1)
            store(dz, passing(inside, Y * out) + later[None, :], row, vv, ok, V)
    if w is not None:
        tl.store(dw + row[:, None], dw_, ok[:, None])
    finish_keys(q, k, e, g, f, row, kk, ok, dA, dL, dD, dy, dr, dx_out, kept, dq, dk, de, dg, df, K, C, DT)


MAX_K = 256     # features of a key that kernels take: with more, a tile or S no longer fits


def launch(kernel, grid, *args, **how):
    """kernel[grid](...) on the device of its first argument, a tensor; Triton takes the current one."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **how)


def value_block(sequences, V):
    """How many value channels a program of a step has: few where there are few sequences, so that at GPT-2's
    size (12 heads of 64) a single text still makes 96 programs."""
    return min(triton.next_power_of_2(V), 8 if sequences <= 64 else 16)


@jit
def vector(p, seq, i, D: tl.constexpr, absent: tl.constexpr = 1.0):
    """Row seq of a (sequences, D) tensor, [len(i)] in fp32, 0 outside; [1] for one number, or for None."""
    if p is None:
        return tl.full([1], absent, tl.float32)
    elif D == 1:
        return tl.load(p + seq + tl.zeros([1], tl.int32)).to(tl.float32)
    else:
        return tl.load(p + seq * D + i, i < D, 0.0).to(tl.float32)


@jit
def decay_write_read(S, n, q, k, v, w, e, log_f, log_z, floor, ERASE: tl.constexpr, NORM: tl.constexpr,
                     LOG_MIN: tl.constexpr):
    """The definition for one step. S [BV, BK], n, q, k [BK], v [BV], w, e [1], log_f [BK|1], log_z [BV|1], or
    [1] with NORM -> S, n, o [BV]"""
    f = tl.exp(tl.maximum(log_f, LOG_MIN))
    z = tl.exp(tl.maximum(log_z, LOG_MIN))
    S = S * f[None, :] * z[:, None]
    u = w * v
    if ERASE:
        u -= e * tl.sum(S * k[None, :], 1)
    S = S + u[:, None] * k[None, :]
    o = tl.sum(S * q[None, :], 1)
    if NORM:
        n = n * f * z + w * k
        o = o / tl.maximum(tl.sum(n * q, 0), floor)
    return S, n, o


# for each sequence and each block of BV value channels, in parallel:      the definition, for one step
#     S = (z f^T) * S                                           a [BV, BK] part, read and written once
#     S = S + (w v - e S k) k^T
#     o = S q                                                   with NORM divided by n.q, n the last row of S
@jit
def one_step(q, k, v, w, e, f, z, S, floor, o, S_new, K: tl.constexpr, V: tl.constexpr, FD: tl.constexpr,
             ZD: tl.constexpr, NORM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LOG_MIN: tl.constexpr):
    """Of q, k, v and gates as `recurrent` takes them. S_new is another tensor: every program reads n."""
    seq = tl.program_id(0).to(tl.int64)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    q_ = vector(q, seq, kk, K)
    k_ = vector(k, seq, kk, K)
    v_ = vector(v, seq, vv, V)
    w_ = vector(w, seq, kk, 1)
    e_ = vector(e, seq, kk, 1)
    f_ = vector(f, seq, kk, FD, 0.0)
    z_ = vector(z, seq, vv, ZD, 0.0)
    first = seq * (V + NORM)
    last = (first + V * NORM) * K + kk                          # unless NORM, a row of no use
    S_ = load(S, first + vv, kk, vv < V, K)
    n = tl.load(S + last, kk < K, 0.0).to(tl.float32)
    S_, n, o_ = decay_write_read(S_, n, q_, k_, v_, w_, e_, f_, z_, floor, e is not None, NORM, LOG_MIN)
    tl.store(o + seq * V + vv, o_.to(o.dtype.element_ty), vv < V)
    store(S_new, S_, first + vv, kk, vv < V, K)
    if NORM:
        tl.store(S_new + last, n, (kk < K) & (tl.program_id(1) == 0))


def channels(log_decay):
    """How many channels decay apart; 0 for None."""
    if log_decay is None:
        return 0
    return log_decay.shape[-1]


def has_warp_groups(device):
    """Whether products of 64 rows are one instruction for four warps, as on H100, H200 and B200. Elsewhere
    tiles of 64 steps only put registers on the stack. What is no GPU compiles for one that has them."""
    return device.type != 'cuda' or torch.cuda.get_device_capability(device)[0] in (9, 10)


def kept_as(dtype):
    """The type of operands, and of what is kept for the backward, for values of this one: fp16 ends at
    65,504, and e^80 is beyond."""
    if dtype == torch.float32:
        return dtype
    return torch.bfloat16


def tiles(K, short, dtype):
    """C, BK, BV and DT for keys of size K; fixed, never tuned at run time. short: chunks of CHUNK steps at
    most, else as long as fits."""
    BK = max(16, triton.next_power_of_2(K))
    DT = tl.bfloat16
    if dtype == torch.float32 or triton.knobs.runtime.interpret:
        DT = tl.float32                                 # the interpreter computes with the bits of bf16
    C = min(64, 4096 // BK)
    if short:
        C = min(C, CHUNK)
    if dtype == torch.float32:
        C = 16
    return dict(C=C, BK=BK, BV=min(C, 32), DT=DT)


def walk_tiles(kernel, grid, *args, warps=4, stages=2, **sizes):
    """`launch` with so many warps, and loads that run ahead in a loop by so many rounds. As they are, at
    K = V = 64 in bf16 on A100 and H100 no register is on the stack but where both keys and values decay by
    channel, and two programs of `forward` and `states` fit on a multiprocessor."""
    if sizes['BK'] > 64:
        warps = min(8, 2 * warps)
    launch(kernel, grid, *args, **sizes, num_warps=warps, num_stages=stages)


def segments(programs, T, C):
    """Into how many segments, a power of two, sequences of T steps are cut so that the programs that walk
    through them fill a GPU: two on each of 132 SMs; not shorter than 8 chunks."""
    n = 1
    while 2 * n * programs <= 264 and 2 * n * 8 * C <= T:
        n *= 2
    return n


def whole(k, e, g, f, z, N, size):
    """What each sequence does to the state it begins with: S P, P (B, H, K, K), where it erases, else S * P,
    P (B, H, V|1, K|1)."""
    B, H, T, K = k.shape
    if e is not None:
        P = torch.empty(B, H, K, K, device=k.device)
        eye = torch.eye(K, device=k.device).expand_as(P).contiguous()
        grid = B * H, triton.cdiv(K, size['BV'])
        none = None, None, None, None
        walk_tiles(forward, grid, k, k, None, None, e, g, f, None, N, eye, *none, P, 0.0, T, K, K, 0, **size)
        return P
    log_P = torch.zeros(B, H, 1, 1, device=k.device)
    if g is not None:
        log_P = log_P + g.sum(2)[..., None, None]
    if f is not None:
        log_P = log_P + f.sum(2)[..., None, :]
    if z is not None:
        log_P = log_P + z.sum(2)[..., :, None]
    return log_P.exp()


def entering(S, P, own, order, erases):
    """The states that segments begin with, (B, H n, V, K), from S of the first: each hands on S P (or S * P)
    + own. order: of the n segments, of which P and own (B, H n, ., .) tell."""
    n = len(order)
    P = P.unflatten(1, (-1, n))
    own = own.unflatten(1, (-1, n))
    found = [None] * n
    for i in order:
        found[i] = S
        if erases:
            S = (S.double() @ P[:, :, i].double()).float()      # which autocast leaves alone
        else:
            S = S * P[:, :, i]
        S = S + own[:, :, i]
    return torch.stack(found, 2).flatten(1, 2)


class Tiles(torch.autograd.Function):
    """`Chunks` on a GPU: any T; q, k, v in any of fp32, fp16, bf16; all tensors contiguous. g (B, H, T) is
    the log-decay that all channels share, f and z are by channel. size: of `tiles`. n: each sequence comes
    as n segments, (B, H n, T / n, .), S as that of the first, (B, H, V, K). Then a first pass finds what each
    segment begins with: the same kernel, told to keep nothing but the last state."""
    @staticmethod
    def forward(ctx, q, k, v, w, e, g, f, z, S, norm, floor, size, n):
        B, H, T, K = q.shape
        V = v.shape[-1]
        C = size['C']
        chunks = triton.cdiv(T, C)
        kept = kept_as(v.dtype)
        trained = any(ctx.needs_input_grad)
        grid = B * H, triton.cdiv(V, size['BV'])
        sizes = T, K, V, norm

        def run(S_0, S_T, o=None, n_q=None, U=None, before=None):
            walk_tiles(forward, grid, q, k, v, w, e, g, f, z, N, S_0, o, n_q, U, before, S_T, floor, *sizes,
                       **size)
        N = U = P = before = n_q = None
        if e is not None:
            N = v.new_empty(B * H * chunks, C, C, dtype=kept)
            few = {name: size[name] for name in ('C', 'BK', 'DT')}
            walk_tiles(inverse, (B * H * chunks,), k, e, g, f, N, T, K, **few, warps=4 if C == 64 else 1)
        S_T = S.new_empty(B, H, *S.shape[2:])
        if n > 1:
            P = whole(k, e, g, f, z, N, size)
            run(torch.zeros_like(S_T), S_T)
            S = entering(S, P, S_T, range(n), e is not None)
        o = torch.empty_like(v)
        if norm and (g is not None or f is not None) and trained:
            o = o.float()                               # what n.q gets of the gradient nearly cancels
        if trained:
            before = S.new_empty(B * H, chunks, *S.shape[2:], dtype=kept)
            if norm:
                n_q = S.new_empty(B, H, T)
            if e is not None:                           # of decays by channel little is left of U but v
                U = v.new_empty(v.shape, dtype=kept if z is None else torch.float32)
        run(S, S_T, o, n_q, U, before)
        ctx.more = floor, size, n
        ctx.save_for_backward(q, k, v, w, e, g, f, z, N, U, P, before, n_q, o if norm else None)
        return o.to(v.dtype), S_T.unflatten(1, (-1, n))[:, :, -1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        q, k, v, w, e, g, f, z, N, U, P, before, n_q, o = ctx.saved_tensors
        floor, size, n = ctx.more
        B, H, T, K = q.shape
        V = v.shape[-1]
        chunks = triton.cdiv(T, size['C'])
        norm = n_q is not None
        dn_q = None
        if norm:
            do = do / n_q.clamp(min=floor)[..., None]
            dn_q = -(do * o).sum(-1) * (n_q > floor)
        do = do.contiguous()
        grid = B * H, triton.cdiv(V, size['BV'])
        sizes = T, K, V, int(norm)

        def run(dS_T, dS_0, dY=None, after=None):
            walk_tiles(states, grid, q, k, e, g, f, z, N, do, dn_q, dS_T, dY, after, dS_0, *sizes, **size)
        dS_0 = dS.new_empty(B, H, *dS.shape[2:])
        if n > 1:
            run(torch.zeros_like(dS_0), dS_0)
            dS = entering(dS, P if e is None else P.mT, dS_0, range(n)[::-1], e is not None)
        dY = if_given(torch.empty_like, U)
        after = torch.empty_like(before)
        run(dS.contiguous(), dS_0, dY, after)
        given = q, k, v, w, e, g, f, z
        gradients = [if_given(torch.empty_like, x) for x in given]
        if not norm:
            size = {**size, 'BV': 2 * size['BV']}
        warps = 8
        if g is None and f is None and z is None and not norm:
            warps = 4
        walk_tiles(tokens, (B * H * chunks,), *given, do, dn_q, U, dY, before, after, *gradients, *sizes,
                   **size, warps=warps, stages=1)
        return *gradients, dS_0.unflatten(1, (-1, n))[:, :, 0], None, None, None, None


def by_head_or_channel(log_f, log_z):
    """What all channels share of two log-decays, (B, H, T), and what is left of each: None, or by channel."""
    shared = None
    left = []
    for x in log_f, log_z:
        if x is not None and x.shape[-1] == 1:
            shared = x.squeeze(-1) if shared is None else shared + x.squeeze(-1)
            x = None
        left.append(x)
    return shared, *left


def on_gpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR,
           n=None):
    """fastweight.chunked through `Tiles`. n: so many segments, if not as `segments` has it."""
    B, H, T, K = q.shape
    first = (x[:, :, :1] for x in (q, k, v))                # of these only the sizes are asked
    *_, write, erase, log_f, log_z, S = prepared(*first, write, erase, log_f, log_z, S, normalise)
    g, f, z = by_head_or_channel(log_f, log_z)
    if f is None:                                           # else they meet decays before they are rounded
        q = q.to(kept_as(v.dtype))
        k = k.to(kept_as(v.dtype))
    short = f is not None or z is not None or (normalise and g is not None)     # n and a decay: registers
    short = short or not has_warp_groups(q.device)
    size = tiles(K, short, v.dtype)
    if n is None:
        n = segments(B * H * triton.cdiv(v.shape[-1], size['BV']), T, size['C'])
    if erase is not None and z is not None:                 # what a segment does to S is then no matrix P
        n = 1

    def cut(x):
        x = filled(x, -T % n)
        return x.contiguous().view(B, H * n, -1, *x.shape[3:])
    steps = [if_given(cut, x) for x in (q, k, v, write, erase, g, f, z)]
    o, S = Tiles.apply(*steps, S.contiguous(), int(normalise), floor, size, n)
    return o.reshape(B, H, -1, o.shape[-1])[:, :, :T], S


def step_on_gpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False,
                floor=FLOOR):
    """fastweight.recurrent for a single step, no gradients. The state is fp32, whatever came in."""
    B, H, _, K = q.shape
    V = v.shape[-1]
    if K > MAX_K:
        raise ValueError(f'q: expected at most {MAX_K} features for a step on a GPU, not {K}')
    norm = int(normalise)
    if S is None:
        S = v.new_zeros(B, H, V + norm, K, dtype=torch.float32)
    tensors = q, k, v, write, erase, log_f, log_z, S
    tensors = [if_given(torch.Tensor.contiguous, x) for x in tensors]
    o = v.new_empty(v.shape)
    S_new = S.new_empty(S.shape, dtype=torch.float32)
    BK = triton.next_power_of_2(K)
    BV = value_block(B * H, V)
    grid = B * H, triton.cdiv(V, BV)
    sizes = K, V, channels(log_f), channels(log_z), norm, BK, BV, LOG_MIN
    launch(one_step, grid, *tensors, floor, o, S_new, *sizes, num_warps=1)
    return o, S_new


# ---- one entrance for all machines -------------------------------------------------------------------------
# `chunked` asks: a single step? an Nvidia GPU? It takes Triton only where a small case of the same kind,
# compared with fastweight.recurrent on this machine, was right; the answer is kept by kind of arguments.
NAMES = 'q', 'k', 'v', 'write', 'erase', 'log_f', 'log_z', 'S'


def expect(name, x, device, *shapes):
    """ValueError unless x is None, or floating point on the device in one of the shapes."""
    if x is None:
        return
    if x.shape not in shapes:
        raise ValueError(f'{name}: expected {" or ".join(map(str, shapes))}, not {tuple(x.shape)}')
    if x.device != device or not x.is_floating_point():
        raise ValueError(f'{name}: expected floating point on {device}, not {x.dtype}, {x.device}')


def check(q, k, v, write, erase, log_f, log_z, S, normalise):
    """ValueError unless all shapes fit together, all tensors are floating and on one device, and there is a
    mean where one is asked for."""
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f'q: expected a tensor (B, H, T, K) that is not empty, not {tuple(q.shape)}')
    B, H, T, K = q.shape
    V = v.shape[-1]
    one = (B, H, T)
    expect('q', q, q.device, (*one, K))
    expect('k', k, q.device, (*one, K))
    expect('v', v, q.device, (*one, V))
    expect('write', write, q.device, one)
    expect('erase', erase, q.device, one)
    expect('log_f', log_f, q.device, (*one, K), (*one, 1))
    expect('log_z', log_z, q.device, (*one, V), (*one, 1))
    expect('S', S, q.device, (B, H, V + bool(normalise), K))
    if normalise:
        refuse(erase, log_z)


def small_case(tensors, normalise):
    """Random tensors like those of a call, and a state; steps for two tiles and a rest at most. Every
    other head forgets fast. On a GPU there are so many that all of it is busy: some faults show only then."""
    draw = torch.Generator().manual_seed(0)
    q = tensors['q']
    heads = 144 if q.is_cuda else 2
    T = min(q.shape[2], 2 * 64 + 3)
    case = {}
    for name in NAMES[:-1]:
        x = tensors[name]
        if x is not None:
            case[name] = torch.rand(1, heads, T, *x.shape[3:], generator=draw).to(x)
    V = case['v'].shape[-1] + bool(normalise)
    case['S'] = torch.rand(1, heads, V, q.shape[-1], generator=draw).to(q.device)
    for name in 'q', 'k', 'v', 'S':
        if not normalise:                               # else the features must be >= 0
            case[name] = case[name] - 0.5
    case['k'] = case['k'] / case['k'].shape[-1] ** 0.5
    fast = torch.tensor([0.1, 5.0]).repeat(heads // 2).view(1, heads, 1, 1).to(q.device)
    for name in {'log_f', 'log_z'} & case.keys():
        case[name] = -(fast * case[name]).to(case[name].dtype)
    return {name: x.requires_grad_() for name, x in case.items()}


@contextlib.contextmanager
def poisoned():
    """Fresh memory is full of NaN, so that what a kernel does not write shows."""
    mode = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def with_gradients(form, case, normalise, floor):
    """o, S, and what some number made of both says of each tensor."""
    o, S = form(**case, normalise=normalise, floor=floor)
    if not o.requires_grad:
        return o, S
    return o, S, *torch.autograd.grad((o * o).sum() + (S * S).sum(), list(case.values()))


def fault(f, tensors, normalise, floor=FLOOR):
    """Why f must not be trusted with tensors like these on this machine; None if it may. Compilers have made
    wrong kernels without a word, so a small case goes through f and the definition in fp64, and back. What
    the caller has set, as autocast or tf32, changes nothing. Out of memory is no verdict: it is raised."""
    case = small_case(tensors, normalise)
    exact = {name: x.detach().double().requires_grad_() for name, x in case.items()}
    with torch.autocast(tensors['q'].device.type, enabled=False):
        try:
            with poisoned():
                found = with_gradients(f, case, normalise, floor)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:      # noqa: BLE001  whatever a compiler may raise
            return f'{type(e).__name__}: {"".join(str(e).splitlines()[:1])}'
        right = with_gradients(fastweight.recurrent, exact, normalise, floor)
    limit = 1e-3 if case['v'].dtype == torch.float32 else 3e-2
    for x, y in zip(found, right):
        x = x.double().flatten(2)
        y = y.flatten(2)
        error = ((x - y).norm(dim=-1) / (y.norm(dim=-1) + 1e-6)).max().item()       # of the worst head
        if not error < limit:                           # nor NaN
            return f'results differ from the definition by {error:.1e}'


trusted = {}        # kinds of arguments -> the form that was found right for them, or None


def on_nvidia(plain, tensors, normalise, floor):
    """The Triton form for such tensors once it has shown that it is right, else `plain`."""
    B, H, T, K = tensors['q'].shape
    one = T == 1 and not torch.is_grad_enabled()
    cut = B * H <= 132 and T >= 256                     # then `segments` may cut
    def of(x):
        return x.dtype, x.shape[3:]
    kind = tensors['q'].device, one, cut, normalise, tuple(if_given(of, tensors[x]) for x in NAMES[:-1])
    if kind in trusted:
        return trusted[kind] or plain
    f = on_gpu
    tried = on_gpu
    if one:
        f = tried = step_on_gpu
    elif cut:
        tried = functools.partial(on_gpu, n=2)
    why = 'there is no triton'
    if K > MAX_K:
        why = f'keys have {K} features, kernels take up to {MAX_K}'
    elif triton:
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(not one):
                why = fault(tried, tensors, normalise, floor)
        except torch.OutOfMemoryError:                  # for now; the next call asks again
            return plain
    trusted[kind] = f
    if why:
        trusted[kind] = None
        print(f'kernels.py: no Triton for {tuple(tensors["q"].shape)}, plain torch instead: {why}',
              file=sys.stderr)
    return trusted[kind] or plain


def chunked(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR):
    """As fastweight.chunked, by the fastest form that works here. ValueError for shapes that do not fit."""
    check(q, k, v, write, erase, log_f, log_z, S, normalise)
    form = on_cpu
    if q.shape[2] == 1:
        form = step_on_cpu
    elif q.device.type not in ('cpu', 'cuda'):
        form = fastweight.chunked
    if q.device.type == 'cuda' and torch.float64 not in (q.dtype, k.dtype, v.dtype):
        tensors = dict(zip(NAMES, (q, k, v, write, erase, log_f, log_z, S)))
        form = on_nvidia(form, tensors, normalise, floor)
    return form(q, k, v, write, erase, log_f, log_z, S, normalise, floor)


def step(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR):
    """`chunked` for one step, T = 1."""
    if q.dim() == 4 and q.shape[2] != 1:
        raise ValueError(f'q: expected one step, (B, H, 1, K), not {tuple(q.shape)}; chunked takes more')
    return chunked(q, k, v, write, erase, log_f, log_z, S, normalise, floor)


# ---- rows: what fastweight.bounded does step by step, at once where it is known what goes ------------------
def at_once(q, k, v, rows, t, policy, cache, sinks=0, spill=False, turn=None):
    """`bounded` for T steps where positions alone say what goes (window, sink), or only empty places go."""
    T = q.shape[2]
    rows = append(rows, k, v, t)
    pos = rows['pos'][:, :, None]                       # (B, H, 1, cache + T)
    now = t + torch.arange(T, device=q.device)[:, None]
    stays = sinks * (policy == 'sink')                  # positions below never go
    room = cache - stays - int(spill)                   # how far back a row is seen, beside these
    seen = (pos >= 0) & (pos <= now)
    if policy in ('window', 'sink'):
        seen = seen & ((now - pos <= room) | (pos < stays))
    o, weights, log_mass = attend(q, rows, seen, turn)
    rows['total'] = rows['total'] + weights.sum(2)
    first = (rows['pos'] >= 0) & (rows['pos'] < stays)
    order = rows['pos'].masked_fill(first, t + T).sort(dim=-1, stable=True).indices
    gone, kept = order.split([T, cache], -1)
    return o, log_mass, pick(rows, gone), pick(rows, kept)


def bounded(q, k, v, rows, t, policy, cache, sinks=0, spill=False, turn=None):
    """As fastweight.bounded: at once for window, sink, and as long as places are empty, else step by step."""
    T = q.shape[2]
    if rows is None:
        rows = empty_rows(k, cache)
    if T == 1:
        return bounded_step(q, k, v, rows, t, policy, cache, sinks, spill, turn)
    if policy in ('window', 'sink') and turn is None:
        return at_once(q, k, v, rows, t, policy, cache, sinks, spill)
    free = int((rows['pos'][0, 0] < 0).sum())
    if T <= free:
        return at_once(q, k, v, rows, t, policy, cache, sinks, spill, turn)
    if free == 0:
        return fastweight.bounded(q, k, v, rows, t, policy, cache, sinks, spill, turn)
    q_1, k_1, v_1 = (x[:, :, :free] for x in (q, k, v))
    q_2, k_2, v_2 = (x[:, :, free:] for x in (q, k, v))
    o_1, mass_1, went_1, rows = at_once(q_1, k_1, v_1, rows, t, policy, cache, sinks, spill, turn)
    o_2, mass_2, went_2, rows = fastweight.bounded(q_2, k_2, v_2, rows, t + free, policy, cache, sinks, spill,
                                                   turn)
    went = {name: torch.cat([went_1[name], went_2[name]], 2) for name in rows}
    return torch.cat([o_1, o_2], 2), torch.cat([mass_1, mass_2], 2), went, rows


# ---- the convolution and the activation of a block, with backwards by hand ---------------------------------
class ShiftedSum(torch.autograd.Function):
    """Each weight multiplies the whole input at once, shifted: y[s:] += w_s x[:-s]. The backward is the same
    with the shift turned round, by hand, because autograd's own takes three times as long: for each slice it
    makes a tensor of the input's size."""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x * w[-1]
        for s in range(1, min(len(w), x.shape[1])):
            y[:, s:].addcmul_(x[:, :-s], w[-1 - s])
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = dy * w[-1]
        dw = torch.zeros_like(w)
        dw[-1] = (dy * x).sum((0, 1))
        for s in range(1, min(len(w), x.shape[1])):
            dx[:, :-s].addcmul_(dy[:, s:], w[-1 - s])
            dw[-1 - s] = (dy[:, s:] * x[:, :-s]).sum((0, 1))
        return dx, dw


def shifted_sum(x, w):
    """y_t = sum_s w_s x_{t-s}, s = 0..n, zeros before x. x (B, T, D), w (n + 1, D), its last row for s = 0 ->
    y (B, T, D)"""
    return ShiftedSum.apply(x, w)


class ReluSquared(torch.autograd.Function):
    """Keeps only max(x, 0): half autograd's traffic."""
    @staticmethod
    def forward(ctx, x):
        r = x.clamp(min=0)
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx, dy):
        r, = ctx.saved_tensors
        return (dy * r).mul_(2)


def relu_squared(x):
    """max(x, 0)^2 (Primer, arXiv:2109.08668, sec. 3)"""
    if x.requires_grad:
        return ReluSquared.apply(x)
    return x.relu().square()                            # a trace of steps shall have no Python in it


# ---- a step of a layer in place: three Triton kernels ------------------------------------------------------
# A step of twelve layers is some 400 operations of a few microseconds each. Here it is 8 to 10 a layer, see
# InPlace.play. The state is written where it lies. Sums are fp32.
#
#   kernel       a program for                          reads                      writes
#   norm_shift   a text                                 x, n earlier inputs        y, these moved on by one
#   one_token    a head and BV of its value channels    q k v gates, S             o, S (and n) in place
#   one_row      a head                                 q k v, t rows of k and v   o, row t of k and v
@jit
def norm_shift(x, scale, bias, eps, last, w, y, RMS: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
               BD: tl.constexpr):
    """y = sum_j w_j h_{t-N+j}, j = 0..N, h_t the LayerNorm or RMSNorm of x, last those before it; without w
    y = h_t. x, y (B, D)   scale, bias (D)   last (B, N, D), moved on in place   w (N + 1, D)"""
    seq = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BD)
    ok = i < D
    h = vector(x, seq, i, D)
    if not RMS:
        h = tl.where(ok, h - tl.sum(h, 0) / D, 0.0)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / D + eps) * vector(scale, 0, i, D)
    if bias is not None:
        h += vector(bias, 0, i, D)
    if w is not None:
        new = h
        h = new * vector(w, N, i, D)
        for j in tl.static_range(N):
            then = vector(last, seq * N + j, i, D)
            h += then * vector(w, j, i, D)
            if j > 0:
                tl.debug_barrier()                      # until every thread has read row j - 1
                tl.store(last + (seq * N + j - 1) * D + i, then.to(last.dtype.element_ty), ok)
        if N > 0:
            tl.store(last + (seq * N + N - 1) * D + i, new.to(last.dtype.element_ty), ok)
    tl.store(y + seq * D + i, h.to(y.dtype.element_ty), ok)


@jit
def softplus(x):
    """log(1 + e^x), also where 1 + e^x rounds to 1: slow decays count."""
    y = tl.exp(-tl.abs(x))
    log1p = tl.where(y < 0.01, y * (1 - y * (0.5 - y / 3)), tl.log(1 + y))
    return tl.maximum(x, 0.0) + log1p


@jit
def one_less_exp(x):
    """1 - e^x, x <= 0, also where e^x rounds to 1."""
    return tl.where(x > -0.01, -x * (1 + x * (0.5 + x / 6)), 1 - tl.exp(x))


@jit
def softmax_of(x, ok):
    """softmax over the entries that are ok, 0 elsewhere."""
    top = tl.max(tl.where(ok, x, float('-inf')), 0)
    e = tl.exp(tl.where(ok, x - top, float('-inf')))
    return e / tl.sum(e, 0)


@jit
def after_rope(p, i, t, speed, D: tl.constexpr):
    """Entries i of the vector of D numbers at p, 0 outside, turned by t times speed (D / 2), unless None."""
    x = vector(p, 0, i, D)
    if speed is not None:
        half: tl.constexpr = D // 2
        other = vector(p, 0, (i + half) % D, D)
        angle = tl.load(t).to(tl.float32) * vector(speed, 0, i % half, D)
        x = tl.where(i < D, x * tl.cos(angle) + tl.where(i < half, -other, other) * tl.sin(angle), 0.0)
    return x


@jit
def feature(p, t, speed, W, b, head, kk, SCALE: tl.constexpr, PHI: tl.constexpr, NORM: tl.constexpr,
            K: tl.constexpr, D: tl.constexpr):
    """normaliser(phi(rope(x))), [BK], of the D numbers x at p. W (H, m, D), b (H, m): a learned map, its m
    rows used twice by hedgehog, for [softmax(W x), softmax(-W x)]."""
    if W is None:
        x = SCALE * after_rope(p, kk, t, speed, D)
    else:
        m = K
        if PHI == 'hedgehog':
            m = D
        x = tl.zeros_like(kk).to(tl.float32)
        for start in range(0, D, 16):
            i = start + tl.arange(0, 16)
            x_ = SCALE * after_rope(p, i, t, speed, D)
            x += tl.sum(load(W, head * m + kk % m, i, kk < K, D) * x_[None, :], 1)
        if b is not None:
            x += vector(b, head, kk, K)
    if PHI == 'relu':
        x = tl.maximum(x, 0.0)
    elif PHI == 'silu':
        x = x * tl.sigmoid(x)
    elif PHI == 'elu':
        x = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    elif PHI == 'exp':
        x = tl.exp(x)
    elif PHI == 'hedgehog':
        x = softmax_of(x, kk < D) + softmax_of(-x, (kk >= D) & (kk < K))
    x = tl.where(kk < K, x, 0.0)
    if NORM == 'l2':
        x = x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
    elif NORM == 'sum':
        x = x / tl.maximum(tl.sum(x, 0), 1e-6)
    return x


# for each head and each block of BV value channels, in parallel:
#     q, k = normaliser(phi(rope(q))), normaliser(phi(rope(k)))     redundantly in each block
#     w, e, f, z = the head's gates
#     S = (z f^T) * S;  S = S + (w v - e S k) k^T                   read and written once, where it lies
#     o = S q, divided by n.q
@jit
def one_token(row, t, speed, W, b, bias, rate, S, o, floor, H: tl.constexpr, G: tl.constexpr,
              D: tl.constexpr, K: tl.constexpr, NW: tl.constexpr, NF: tl.constexpr, NZ: tl.constexpr,
              WRITE: tl.constexpr, FIXED: tl.constexpr, ERASE: tl.constexpr, BETA_MAX: tl.constexpr,
              PHI: tl.constexpr, NORM: tl.constexpr, Q_SCALE: tl.constexpr, K_SCALE: tl.constexpr,
              ROWS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LOG_MIN: tl.constexpr):
    """A step of fast weights from a row of the projection (B, .): H queries, G keys, G values of D numbers,
    then for each head its raw gates, NW of write (0 or 1), NF of f, NZ of z. bias (H, NF + NZ), rate (H): as
    in model.Gates; FIXED: log f = -rate. S (B, H, ROWS, K): with NORM 'attn' behind the D rows of S comes n,
    once for each block of channels, so that none reads what another one writes. o (B, H, D)"""
    seq = tl.program_id(0).to(tl.int64)
    head = seq % H
    group = head // (H // G)
    row += seq // H * ((H + 2 * G) * D + H * (NW + NF + NZ))
    gates = row + (H + 2 * G) * D + head * (NW + NF + NZ)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    q_ = feature(row + head * D, t, speed, W, b, head, kk, Q_SCALE, PHI, NORM, K, D)
    k_ = feature(row + (H + group) * D, t, speed, W, b, head, kk, K_SCALE, PHI, NORM, K, D)
    v_ = vector(row + (H + G + group) * D, 0, vv, D)
    S_ = load(S, seq * ROWS + vv, kk, vv < D, K)
    n_at = S + (seq * ROWS + D + tl.program_id(1)) * K + kk
    n = tl.zeros_like(q_)
    if NORM == 'attn':
        n = tl.load(n_at, kk < K, 0.0)
    rate_ = vector(rate, head, kk, 1)
    bias += head * (NF + NZ)
    w_ = tl.full([1], 1.0, tl.float32)
    log_f = tl.zeros([1], tl.float32)
    log_z = tl.zeros([1], tl.float32)
    if FIXED:
        log_f = -rate_
    if NF:
        log_f = -rate_ * softplus(vector(gates + NW, 0, kk, NF) + vector(bias, 0, kk, NF))
    if NZ:
        log_z = -rate_ * softplus(vector(gates + NW + NF, 0, vv, NZ) + vector(bias + NF, 0, vv, NZ))
    if WRITE == 'beta':
        w_ = BETA_MAX * tl.sigmoid(vector(gates, 0, kk, 1))
    if WRITE == '1-f':
        w_ = one_less_exp(tl.maximum(log_f, LOG_MIN))
    S_, n, o_ = decay_write_read(S_, n, q_, k_, v_, w_, w_, log_f, log_z, floor, ERASE, NORM == 'attn',
                                 LOG_MIN)
    if NORM == 'attn':
        tl.store(n_at, n, kk < K)
    store(S, S_, seq * ROWS + vv, kk, vv < D, K)
    tl.store(o + seq * D + vv, o_.to(o.dtype.element_ty), vv < D)


# for each head, in parallel:
#     q, k = rope(q), rope(k)
#     row t of the cache = k, v
#     for each block of BR rows below t:                            reads the cache once
#         o, total = both times e^(old top - new top), plus e^(s - new top) v and its sum, s = q.k / sqrt(D)
#     o = o / total
@jit
def one_row(row, t, speed, keys, values, o, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
            ROWS: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """A step of softmax attention from a row of the projection (B, (H + 2 G) D). keys, values (B, H, ROWS,
    D): t rows are taken; t is read on the device, so that a graph may count it up. o (B, H, D). A head is one
    program: right for B H of a hundred or more, while a long cache of one text would want its rows split."""
    seq = tl.program_id(0).to(tl.int64)
    head = seq % H
    group = head // (H // G)
    row += seq // H * ((H + 2 * G) * D)
    i = tl.arange(0, BD)
    now = tl.load(t).to(tl.int32)
    q_ = after_rope(row + head * D, i, t, speed, D) * D ** -0.5
    k_ = after_rope(row + (H + group) * D, i, t, speed, D)
    o_ = vector(row + (H + G + group) * D, 0, i, D)                 # its own row comes first: e^0 v
    at = (seq * ROWS + now) * D + i
    tl.store(keys + at, k_.to(keys.dtype.element_ty), i < D)
    tl.store(values + at, o_.to(values.dtype.element_ty), i < D)
    top = tl.sum(q_ * k_, 0)
    total = 1.0
    for start in range(0, now, BR):
        r = start + tl.arange(0, BR)
        s = tl.sum(load(keys, seq * ROWS + r, i, r < now, D) * q_[None, :], 1)
        s = tl.where(r < now, s, float('-inf'))
        new_top = tl.maximum(top, tl.max(s, 0))
        a = tl.exp(s - new_top)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(a, 0)
        o_ = o_ * shrink + tl.sum(a[:, None] * load(values, seq * ROWS + r, i, r < now, D), 0)
        top = new_top
    tl.store(o + seq * D + i, (o_ / total).to(o.dtype.element_ty), i < D)


# ---- a step as a list of operations, without Python --------------------------------------------------------
def recorded(model, token, state, choose, generator=None):
    """A function (token (B, 1), state) -> token, state that is model.step with this choose(logits) without
    Python, which is most of it at this size. Where steps cannot be recorded it is model.step itself.

    CPU: a trace of the model. Nvidia: a CUDA graph, with the choice in it; generator: from which `choose`
    draws. Both have their own copy of the state, written over at each step: what they return is good until
    the next step; what they are given stays as it is. They play with the weights that the model has now, and
    in torch.inference_mode(), as GPT.generate does."""
    try:
        why = unrecordable(model, token, state)
        if why is None and token.is_cuda:
            return Recording(model, token, state, choose, generator).step
        if why is None:
            return Traced(model, token, state, choose).step
    except Exception as e:      # noqa: BLE001  whatever a compiler, a tracer or a driver may raise
        why = f'{type(e).__name__}: {"".join(str(e).splitlines()[:1])}'
    if why:
        print(f'steps are not recorded: {why}', file=sys.stderr)
    return functools.partial(model.step, choose=choose)


def unrecordable(model, token, state):
    """Why a step of this model cannot be recorded, '' where that is no news, None if it can."""
    device = token.device.type
    if state is None or device not in ('cpu', 'cuda'):
        return ''
    if any(getattr(m, 'max_len', None) for m in model.blocks.modules()):
        return 'cosformer needs the position as a number'
    if device == 'cpu':
        return None
    if torch.is_autocast_enabled(device):
        return 'autocast keeps copies of weights, which a graph would outlive'
    growing = [block for block in model.blocks if block.mixer.memory.rule.keeps == 'all']
    if any(kind_of(block) is not RowLayer for block in growing):
        return f'a state that grows needs Triton, and heads of at most {MAX_K}'
    return None


class Spread(nn.Module):
    """A model as torch.jit.trace wants it: tensors in, tensors out, those of the state layer by layer."""
    def __init__(self, model, state):
        super().__init__()
        self.model = model
        self.names = [list(layer) for layer in state]
        self.training = model.training

    def forward(self, token, *tensors):
        logits, state = self.model(token, self.layers(tensors))
        return logits, *self.tensors(state)

    def tensors(self, state):
        """The tensors of a state, the dicts of a model's layers."""
        return [layer[name] for layer, names in zip(state, self.names) for name in names]

    def layers(self, tensors):
        """The state that these tensors are."""
        each = iter(tensors)
        return [{name: next(each) for name in names} for names in self.names]


def room(t):
    """How many rows to make room for: the power of two above 2 t, at least 256."""
    return max(256, 2 ** (2 * t).bit_length())


class Roomy:
    """What records steps from a state with room for so many `rows`, where some layer's grow."""
    def __init__(self, model, state, choose, generator=None):
        self.model = model
        self.choose = choose
        self.generator = generator
        self.grows = 'all' in model.config.keeps()
        self.rows = room(int(state[0]['t']))
        self.further = None                             # what takes the steps when the rows are full

    def full(self, token, state):
        """Whether the rows are full: then `further`, another recording with more room, goes on."""
        if self.further is None and self.grows and state[0]['t'] >= self.rows:
            self.further = recorded(self.model, token, state, self.choose, self.generator)
        return self.further is not None


class Traced(Roomy):
    """`recorded` by torch.jit.trace: the operations of one step, played without Python. Of a model in
    evaluation weights become constants, and a third of the trace goes, their lookups."""
    def __init__(self, model, token, state, choose):
        super().__init__(model, state, choose)
        self.spread = Spread(model, state)
        given = token, *self.spread.tensors(of_its_own(state, self.rows))
        forms = model.forms
        model.use(forms._replace(recurrence=step_over, softmax=softmax_over))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')         # torch.jit is frozen in time, and says so
                self.play = torch.jit.trace(self.spread, given, check_trace=False, strict=False)
                if not model.training:
                    self.play = player(torch.jit.freeze(self.play), given)
        finally:
            model.use(forms)
        self.state = None                               # the last step's, which is written over
        self.tensors = None                             # what it consists of

    def step(self, token, state):
        """token (B, 1), state -> token, state. The state is copied, unless it is the last step's own."""
        if self.full(token, state):
            self.play = self.state = self.tensors = None        # its memory is free again
            return self.further(token, state)
        if state is not self.state:
            self.tensors = self.spread.tensors(of_its_own(state, self.rows, self.state))
        logits, *self.tensors = self.play(token, *self.tensors)
        self.state = self.spread.layers(self.tensors)
        return self.choose(logits[:, -1]), self.state


def player(frozen, given):
    """What plays a frozen trace: torch's Static Runtime, which keeps the memory of its results from step to
    step and knows beforehand which kernels it calls, a fifth less time. It is no documented part of torch:
    where a version lacks it, or a first step of what is `given` fails, it is the trace's own interpreter."""
    try:
        if all(x.dtype != torch.float64 for x in given):
            with_fp32_numbers(frozen.graph)
        play = torch._C._jit_to_static_module(frozen._c)
        play(*given)
    except (AttributeError, RuntimeError):
        return frozen
    return play


def with_fp32_numbers(graph):
    """Makes fp32 of numbers, which a trace holds as fp64 tensors without an axis: an fp32 tensor that meets
    one would find out at every step what to convert to what, up to 5 % of it."""
    for node in graph.findAllNodes('prim::Constant'):
        if node.hasAttribute('value') and node.kindOf('value') == 't':
            x = node.t('value')
            if x.dim() == 0 and x.dtype == torch.float64:
                node.t_('value', x.float())


def of_its_own(state, rows=0, last=None):
    """A state, the dicts of a model's layers, whose matrices are copies. The columns of these, not the rows,
    lie in one piece: what q and k find is a sum of columns, which is faster than a product with each row.
    Keys and values that grow get room for so many rows, unless they lie where those of the last state do."""
    mine = []
    for i, layer in enumerate(state):
        copies = {name: layer[name].mT.clone(memory_format=torch.contiguous_format).mT
                  for name in ('S', 'n') if name in layer}      # n: of --overflow, mass
        if 'k' in layer and 'pos' not in layer:
            for name in 'k', 'v':
                if last is None or layer[name].data_ptr() != last[i][name].data_ptr():
                    copies[name] = with_room(layer[name], rows)
        mine.append({**layer, **copies})
    return mine


def with_room(x, rows):
    """A copy of x (B, H, T, d), T < rows, with room behind each head's last row."""
    B, H, T, d = x.shape
    longer = x.new_empty(B, H, rows, d)[:, :, :T]
    return longer.copy_(x)


def one_more(x, new):
    """x (B, H, T, d), which has room, with `new` (B, H, 1, d) behind it: x where it lies, not a copy."""
    B, H, T, d = x.shape
    longer = x.as_strided((B, H, T + 1, d), x.stride())
    longer[:, :, T:].copy_(new)
    return longer


def softmax_over(q, k, v, rows):
    """fastweight.softmax for one step, of rows that have room."""
    k = one_more(rows['k'], k)
    v = one_more(rows['v'], v)
    return F.scaled_dot_product_attention(q, k, v), dict(k=k, v=v)


def captured(play, device, generator):
    """A function that does what play() does, as one launch: a CUDA graph. It knows addresses only: the caller
    keeps alive what play reads and writes."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):                   # here libraries wake up and kernels are compiled
            play()
            play()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            play()
    return graph.replay


class Recording(Roomy):
    """`recorded` as a graph: one step in memory of its own. `play` reads the token `here`, the position t and
    the state of `layers`, and leaves there those of the next step, with nothing for Python to remember.

    It holds the model: a graph has the addresses of its weights, and must not outlive them. RuntimeError
    unless its first step is that of the model: compilers have made wrong kernels, far more off than rounding,
    some percent in bf16 at 12 layers."""
    def __init__(self, model, token, state, choose, generator=None):
        super().__init__(model, state, choose, generator)
        self.here = token.clone()
        self.t = state[0]['t'].to(token.device, copy=True)
        self.layers = []
        for block, given in zip(model.blocks, state):
            self.layers.append(kind_of(block)(block, given, model.forms, self.rows))
        if generator is not None:
            drawn = generator.get_state()
        self.replay = captured(self.play, token.device, generator)
        self.state = None                               # none of its own: a step begins with a copy
        self.step(token, state)
        if generator is not None:                       # a seed says the same text, recorded or not
            generator.set_state(drawn)
        expected = model(token, state)[0][:, -1].float()
        error = (self.logits.float() - expected).norm() / expected.norm()
        limit = 1e-2 if self.logits.dtype == torch.float32 else 1e-1
        if not error < limit:
            raise RuntimeError(f'the graph differs from the model by {error:.1e}')

    def play(self):
        """A step: token and state in, token and state out, all where they lie."""
        x = self.model.embedded(self.here, [{'t': self.t}])[:, 0]
        for layer in self.layers:
            x = layer.play(x, self.t)
        self.logits = F.linear(self.model.norm(x), (self.model.head or self.model.embed).weight)
        self.here.copy_(self.choose(self.logits))
        self.t.add_(1)

    def load(self, state):
        """Take over a state, which stays as it is."""
        self.t.copy_(state[0]['t'])
        self.state = []
        for layer, given in zip(self.layers, state):
            layer.load(given)
            self.state.append({'t': given['t'].clone()})

    def step(self, token, state):
        """token (B, 1), state -> token, state. The state is copied in, unless it is the last step's own."""
        if self.full(token, state):
            self.replay = self.layers = None            # its memory is free again
            return self.further(token, state)
        if state is not self.state:
            self.load(state)
        self.here.copy_(token)
        self.replay()
        for layer, mine in zip(self.layers, self.state):
            mine['t'] += 1
            mine.update(layer.state(mine['t']))
        return self.here.clone(), self.state


class Layer:
    """A block's step by the block itself, and its state in memory that stays where it is. play(x (B, n_embd),
    position t) -> x, and writes the state over."""
    def __init__(self, block, given, forms, rows):
        self.block = block
        self.forms = forms
        self.memory = {}
        for name, x in given.items():
            if name != 't':
                self.memory[name] = x.clone(memory_format=torch.contiguous_format)  # kernels take no other

    def load(self, given):
        """Copy in a state of the layer. Of an earlier one of its own, rows and sums lie where they should."""
        for name, x in self.state(given['t']).items():
            if x.data_ptr() != given[name].data_ptr():
                x.copy_(given[name])

    def state(self, t):
        """The state after t tokens as the model takes it: not a copy."""
        return self.memory

    def play(self, x, t):
        x, new = self.block(x[:, None], {**self.memory, 't': t})
        self.load(new)
        return x[:, 0]


def onto(x, h, linear):
    """x += linear(h), in place."""
    x.addmm_(h, linear.weight.T)
    if linear.bias is not None:
        x.add_(linear.bias)


class InPlace(Layer):
    """What FastLayer and RowLayer share: all of a block but the mixing itself, `mix(row, t, o)`."""
    def __init__(self, block, given, forms, rows):
        super().__init__(block, given, forms, rows)
        mixer = block.mixer
        self.mixer = mixer
        self.sizes = dict(H=mixer.n_head, G=mixer.n_kv_head, D=mixer.head_dim)
        self.weight = mixer.qkv.weight
        self.bias = mixer.qkv.bias
        gates = mixer.memory.gates
        if any(gates.sizes):                            # one product for all that is made of the same input
            extra = gates.proj.weight
            self.weight = torch.cat([self.weight, extra])
            if self.bias is not None:
                self.bias = F.pad(self.bias, (0, len(extra)))
        self.speed = None
        if mixer.rope:
            self.speed = mixer.speeds(device=self.weight.device)

    def look(self, i, norm, x):
        """Block.convolve of norm(x), i = 0 before the mixer, 1 before the MLP."""
        last = w = None
        N = 0
        if self.block.convs:
            last = self.memory[f'conv{i}']
            w = self.block.convs[i].weight
            N = len(w) - 1
        y = torch.empty_like(x)
        D = x.shape[1]
        sizes = isinstance(norm, nn.RMSNorm), N, D, triton.next_power_of_2(D)
        bias = getattr(norm, 'bias', None)
        launch(norm_shift, (len(x),), x, norm.weight, bias, norm.eps, last, w, y, *sizes)
        return y

    def play(self, x, t):
        row = F.linear(self.look(0, self.block.norm1, x), self.weight, self.bias)
        o = x.new_empty(len(x), self.mixer.n_head, self.mixer.head_dim)
        self.mix(row, t, o)
        if self.mixer.out_norm is not None:
            o = self.mixer.out_norm(o)
        onto(x, o.flatten(1), self.mixer.proj)
        if self.block.cross is not None:
            x = self.block.read_source(x[:, None], {**self.memory, 't': t})[0][:, 0]
        h = self.block.widened(self.look(1, self.block.norm2, x))
        onto(x, h, self.block.down)
        return x


class FastLayer(InPlace):
    """Fast weights by `one_token`, with the maps that `map_of` names."""
    def __init__(self, block, given, forms, rows):
        super().__init__(block, given, forms, rows)
        memory = self.mixer.memory
        gates = memory.gates
        phi = memory.phi
        rule = memory.rule
        B, H, n_rows, K = given['S'].shape
        D = self.mixer.head_dim
        BV = value_block(B * H, D)
        self.grid = B * H, triton.cdiv(D, BV)
        if memory.normalise:
            n_rows = D + self.grid[1]                   # n once for each block of channels
        self.S = torch.zeros(B, H, n_rows, K, device=given['S'].device)
        self.memory['S'] = self.S[:, :, :D + memory.normalise]
        W = getattr(phi, 'weight', None)
        bias, rate = decay_of(gates, self.S.new_ones(H, 1, 1))
        self.constants = self.speed, W, getattr(phi, 'bias', None), bias, rate, self.S
        NW, NF, NZ = gates.sizes
        scale = getattr(phi, 's', 1.0)
        q_scale = scale
        if getattr(phi, 'scaled', False):
            q_scale = D ** -0.5
        self.sizes.update(K=K, NW=NW, NF=NF, NZ=NZ, ROWS=n_rows, BK=triton.next_power_of_2(K), BV=BV)
        self.sizes.update(WRITE=rule.write, FIXED=rule.f == 'fixed', ERASE=rule.erase, LOG_MIN=LOG_MIN)
        self.sizes.update(PHI=map_of(phi), NORM=memory.norm, Q_SCALE=q_scale, K_SCALE=scale)
        self.sizes.update(BETA_MAX=gates.beta_max, num_warps=1 if W is None else 4)

    def load(self, given):
        super().load(given)
        n = self.mixer.head_dim
        self.S[:, :, n + 1:] = self.S[:, :, n:n + 1]

    def mix(self, row, t, o):
        launch(one_token, self.grid, row, t, *self.constants, o, self.mixer.memory.phi.floor, **self.sizes)


def decay_of(gates, one):
    """Of model.Gates: the biases of f and z (H, 1, NF + NZ), the rates (H, 1, 1); fp32, as one (H, 1, 1)."""
    rate = gates.rule.rate
    if rate is None:
        rate = gates.log_rate.exp()
    if gates.rule.f == 'fixed':
        rate = -gates.log_fixed
    bias = one[:, :, :0]
    for name in 'bias_f', 'bias_z':
        if hasattr(gates, name):
            bias = torch.cat([bias, getattr(gates, name).float()], -1)
    return bias, one * rate


class RowLayer(InPlace):
    """Softmax attention by `one_row`: keys and values of t tokens, with room for `rows`."""
    def __init__(self, block, given, forms, rows):
        super().__init__(block, given, forms, rows)
        for name in 'k', 'v':
            x = F.pad(given[name], (0, 0, 0, rows - given[name].shape[2]))
            self.memory[name] = x.contiguous()
        self.sizes.update(ROWS=rows, BD=triton.next_power_of_2(self.mixer.head_dim), BR=64)

    def state(self, t):
        state = dict(self.memory)
        for name in 'k', 'v':
            state[name] = state[name][:, :, :t]
        return state

    def mix(self, row, t, o):
        grid = len(row) * self.mixer.n_head,
        launch(one_row, grid, row, t, self.speed, self.memory['k'], self.memory['v'], o, **self.sizes)


# What is done to each entry, or to W x, under the names of `feature`. All other maps, kept rows, overflow and
# the delta rule divided by its keys are left to the model itself.
ENTRYWISE = {fastweight.itself: 'identity', fastweight.elu1: 'elu', torch.relu: 'relu', F.silu: 'silu'}


def map_of(phi):
    """What `feature` calls a feature map, None for one that it does not know."""
    if isinstance(phi, fastweight.Hedgehog) and phi.form in (None, 'softmax'):
        return 'hedgehog'
    if isinstance(phi, fastweight.T2R):
        return 'relu'
    if isinstance(phi, fastweight.Exp):
        return 'exp'
    return ENTRYWISE.get(getattr(phi, 'f', None))


def kind_of(block):
    """The class that plays a block's step: one of the kernels where they take it, else the block itself."""
    memory = block.mixer.memory
    exact = block.up.weight.dtype == torch.float64
    random = block.training and block.dropout.p > 0
    mixer = block.mixer
    odd = mixer.head_dim > MAX_K or mixer.key_dim != mixer.head_dim
    if triton is None or exact or random or block.post_norm or odd:
        return Layer
    if memory.rule.keeps == 'all':
        return RowLayer
    if memory.rule.keeps or memory.by_keys or memory.phi.feature_dim > MAX_K or map_of(memory.phi) is None:
        return Layer
    return FastLayer
