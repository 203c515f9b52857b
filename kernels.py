"""Fast forms of the recurrence: `chunked` as fastweight.chunked means it, with a backward by hand.

    o, S = chunked(q, k, v, write, erase, log_f, log_z, S, normalise)

Every form here has its definition in fastweight.py; test_all.py compares them, values and gradients.
"""
import sys
import types

import torch
import torch.nn.functional as F

import fastweight
from fastweight import FLOOR, LOG_MIN, each, finish, start

try:
    import triton
    import triton.language as tl
except ImportError:         # everything works without; only GPUs are slower
    triton, tl = None, types.SimpleNamespace(constexpr=None)

# ---- CPU: what needs no state for all chunks in one call, the states one after the other -------------------
# Lines 1-4 of fastweight.py, with all decays turned into factors. In a chunk of 32 steps, with decays of at
# least e^-5 a step, e^(a_t - m) counted from the chunk's middle m lies within e^+-80, which fp32 can hold. So
#
#   y_t = q_t e^(a_t - m)    r_t = k_t e^(a_t - m)  where k reads    x_t = k_t e^(m - a_t)  where k is written
#
# and likewise v e^(m - c_t) on the side of the values. In these letters no chunk has any decay inside; the
# state pays e^m to enter it and e^(a_C - m) to leave it. In fp32 nothing overflows while q, k, v are < 10^3:
#
#   A = tril(y x^T)    L = e strict_tril(r x^T)    M = (I + L)^-1    U = M (w v)    W = M (e r)   all chunks
#   U -= W (enter S)^T    S = enter leave S + leave U^T x                              one after the other
#   o = A U + y (enter S)^T                                                                      all chunks
#
# The backward is this read from bottom to top. Gates need no chain through all these factors: log f_t scales
# what any later step reads from t or before, so its gradient is the sum of (reads - writes) from t to the end
# of the chunk, q dq + r dr - x dx, plus dS * S there; on the other side o do - v dv. (GLA 2023, appendix C.)
CHUNK = 32      # of steps that decay, because of e^80; more pays without decay, where the features are many


def times(x, *factors):
    """x * each factor that is there."""
    for y in factors:
        x = x if y is None else x * y
    return x


def factors(g, n):
    """log-decays (N n, C, d) -> e^(g_t - m), e^(m - g_t) (N n, C, d), and by chunk (N, n, 1, d): enter e^m,
    leave e^(g_C - m), and both in one, e^(g_C). All None without decay."""
    if g is None:
        return [None] * 5
    g = g.cumsum(1)
    m, end = g[:, g.shape[1] // 2, None], g[:, -1:]
    return (g - m).exp(), (m - g).exp(), *(x.exp().view(-1, n, 1, g.shape[-1]) for x in (m, end - m, end))


class Chunks(torch.autograd.Function):
    """q, k (B, H, T, K)   v (B, H, T, V)   w, e (B, H, T)   f, z (B, H, T, K|1), (.., V|1)   S (B, H, V, K)
    T a multiple of C  ->  o (B, H, T, V), S. Gates may be None. Inside, N = B H sequences of n chunks each;
    tensors are (N n, C, .) where all chunks are done at once, and split into (N, n, C, .) for the loop."""
    @staticmethod
    def forward(ctx, q, k, v, w, e, f, z, S, C):
        (B, H, T, K), V = q.shape, v.shape[-1]
        N, n = B * H, T // C
        split, join = lambda x: x.view(N, n, *x.shape[1:]), lambda x: x.reshape(N * n, *x.shape[2:])
        q, k, v, w, e, f, z = each(lambda x: x.reshape(N * n, C, -1), q, k, v, w, e, f, z)
        (f_up, f_down, f_in, f_out, f_all), (z_up, z_down, z_in, z_out, z_all) = factors(f, n), factors(z, n)
        y, r, x = times(q, f_up), times(k, f_up), times(k, f_down)
        A, U, M, W = torch.bmm(y, x.mT).tril_(), times(v, w, z_down), None, None
        x_out = times(split(x), f_out)
        if e is None:
            new = split(torch.bmm(join(times(split(U), z_out)).mT, join(x_out)))
        else:
            L = torch.bmm(r, x.mT).mul_(e)              # only s < t of it is looked at
            M = torch.linalg.solve_triangular(L, torch.eye(C).to(L).expand_as(L), upper=False,
                                              unitriangular=True)
            U, W = torch.bmm(M, U), torch.bmm(M, r * e)
        states = S.new_empty(N, n + 1, V, K)            # before each chunk, and after the last
        states[:, 0] = S.reshape(N, V, K)
        for j in range(n):
            S, u = states[:, j], split(U)[:, j]
            gates = each(lambda g: g[:, j], f_in, f_all, z_in, z_out, z_all)
            f_in_j, f_all_j, z_in_j, z_out_j, z_all_j = gates
            if e is not None:
                u -= times(torch.bmm(split(W)[:, j], times(S, f_in_j).mT), z_in_j)
            new_j = new[:, j] if e is None else torch.bmm(times(u, z_out_j).mT, x_out[:, j])
            torch.add(times(S, f_all_j, *each(lambda g: g.mT, z_all_j)), new_j, out=states[:, j + 1])
        S = join(times(states[:, :-1], f_in))
        o = times(torch.bmm(A, U) + join(times(split(torch.bmm(y, S.mT)), z_in)), z_up)
        ctx.save_for_backward(q, k, v, w, e, f_up, f_down, f_in, f_out, f_all, z_up, z_down, z_in, z_out,
                              z_all, A, U, M, W, states, None if z is None else o)
        ctx.sizes = B, H, T, f if f is None else f.shape[-1], z if z is None else z.shape[-1]
        return o.view(B, H, T, V), states[:, -1].reshape(B, H, V, K)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        (q, k, v, w, e, f_up, f_down, f_in, f_out, f_all, z_up, z_down, z_in, z_out, z_all,
         A, U, M, W, states, o) = ctx.saved_tensors
        (B, H, T, f_size, z_size), (N, n, V, K), C = ctx.sizes, states[:, 1:].shape, A.shape[-1]
        split, join = lambda x: x.view(N, n, *x.shape[1:]), lambda x: x.reshape(N * n, *x.shape[2:])
        y, r, x = times(q, f_up), times(k, f_up), times(k, f_down)
        x_out, do, dS = times(split(x), f_out), do.reshape(N * n, C, V), dS.reshape(N, V, K)
        g, S = times(do, z_up), join(times(states[:, :-1], f_in))
        dA, dU = torch.bmm(g, U.mT).tril_(), torch.bmm(A.mT, g)
        g = join(times(split(g), z_in))                 # of what the state gave
        read = times(split(torch.bmm(g.mT, y)), f_in)
        after = torch.empty_like(read)                  # gradient of the state that each chunk hands on
        for j in reversed(range(n)):
            after[:, j], du = dS, split(dU)[:, j]
            gates = each(lambda g: g[:, j], f_in, f_all, z_in, z_out, z_all)
            f_in_j, f_all_j, z_in_j, z_out_j, z_all_j = gates
            if e is not None:
                du += times(torch.bmm(x_out[:, j], dS.mT), z_out_j)
            dS = times(dS, f_all_j, *each(lambda g: g.mT, z_all_j)) + read[:, j]
            if e is not None:
                dS -= times(torch.bmm(times(du, z_in_j).mT, split(W)[:, j]), f_in_j)
        new = join(after)
        if e is None:
            dU += join(times(split(torch.bmm(join(x_out), new.mT)), z_out))
        dq = times(torch.bmm(dA, x) + torch.bmm(g, S), f_up)
        dx = torch.bmm(join(times(split(U), z_out)), new)
        dx = torch.bmm(dA.mT, y) + join(times(split(dx), f_out))
        dr = de = dw = df = dz = None
        if e is not None:
            dU = torch.bmm(M.mT, dU)                    # now of the right hand side, w v - e r S^T
            dR = join(times(split(dU), z_in))
            dL = torch.bmm(dU, U.mT).tril_(-1).neg_()
            B_rx = torch.bmm(r, x.mT).tril_(-1)         # above the diagonal it may be infinite
            de = (dL * B_rx).sum(-1) - (dR * torch.bmm(r, S.mT)).sum(-1)
            dx += torch.bmm((dL * e).mT, r)
            dr = times(torch.bmm(dL * e, x) - torch.bmm(dR * e, S), f_up)
        dx = times(dx, f_down)
        dk = dx if dr is None else dx + dr
        dv = times(dU, z_down)
        if w is not None:
            dw, dv = (dv * v).sum(-1), dv * w

        def gate(reads, dS_S, size):                    # sum from t to the chunk's end, over shared channels
            if size == 1:
                reads, dS_S = reads.sum(-1, True), dS_S.sum(-1, True)
            return (reads.flip(1).cumsum(1).flip(1) + dS_S).view(B, H, T, size)
        if f_size or z_size:
            dS_S = join(after * states[:, 1:])
        if f_size:
            df = gate(q * dq - k * (dx if dr is None else dx - dr), dS_S.sum(1, True), f_size)
        if z_size:
            dz = gate(o * do - v * dv, dS_S.sum(2)[:, None], z_size)
        back = lambda x: None if x is None else x.view(B, H, T, *x.shape[2:])
        return *each(back, dq, dk, dv, dw, de), df, dz, dS.view(B, H, V, K), None


# ---- GPU: the same letters, in four Triton kernels ---------------------------------------------------------
# A tile is one chunk of one sequence. `inverse` and `tokens` have one program a tile; `forward` and `states`
# one a sequence and block of BV value channels: it walks through the chunks, its part of S in registers.
#
#               chunk 0   chunk 1   ...                           reads                  writes
#   inverse     [ tile ]  [ tile ]  all at once                   k e f                  M (C numbers a token)
#   forward     S -> o    S -> o    ...     one after the other   q k v w e f z M        o, S (VK/C a token)
#   states      dS     <- dS     <- ...     from the last back    q k e f z M do         dS (VK/C a token)
#   tokens      [ tile ]  [ tile ]  all at once                   all these, S, dS       dq dk dv dw de df dz
#
# Operands of a product are DT (as given, or bf16 where decays need its range), sums and states fp32.
# A log-decay is a [C, K] tile, or [C, 1] for one a head, or zeros: the same lines serve all of them.
def jit(f):
    return triton.jit(f, do_not_specialize=['T']) if triton else f


@jit
def dot(a, b, DT: tl.constexpr):
    return tl.dot(a.to(DT), b.to(DT), input_precision='tf32x3' if DT == tl.float32 else None)


@jit
def load(p, row, col, T_ok, D: tl.constexpr):
    """Tile [rows, cols] of a (..., D) tensor, in fp32, 0 outside."""
    ok = T_ok[:, None] & (col < D)[None, :]
    return tl.load(p + row[:, None] * D + col[None, :], ok, 0.0).to(tl.float32)


@jit
def store(p, x, row, col, T_ok, D: tl.constexpr):
    ok = T_ok[:, None] & (col < D)[None, :]
    tl.store(p + row[:, None] * D + col[None, :], x.to(p.dtype.element_ty), ok)


@jit
def column(p, row, T_ok, default: tl.constexpr):
    """A number a step, [C, 1]; or the default, for None."""
    if p is None:
        return tl.full([row.shape[0], 1], default, tl.float32)
    else:
        return tl.load(p + row, T_ok, 0.0).to(tl.float32)[:, None]


@jit
def decays(p, row, col, T_ok, D: tl.constexpr, C: tl.constexpr):
    """`factors` of one tile: e^(g - m), e^(m - g) [C, d]; e^m, e^(g_C - m), e^(g_C) [1, d]; d is 1 or BK."""
    if D > 1:
        g = tl.cumsum(load(p, row, col, T_ok, D), 0)
    else:
        g = tl.cumsum(column(p, row, T_ok, 0.0), 0)
    i = tl.arange(0, C)[:, None]
    m = tl.sum(tl.where(i == C // 2, g, 0.0), 0)[None, :]
    end = tl.sum(tl.where(i == C - 1, g, 0.0), 0)[None, :]
    return tl.exp(g - m), tl.exp(m - g), tl.exp(m), tl.exp(end - m), tl.exp(end)


@jit
def letters(q, k, f, row, kk, ok, K: tl.constexpr, FD: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """Of one tile: q, k, y, r, x [C, BK], A [C, C], and what the state pays on the side of the keys."""
    f_up, f_down, f_in, f_out, f_all = decays(f, row, kk, ok, FD, C)
    q_, k_, i = load(q, row, kk, ok, K), load(k, row, kk, ok, K), tl.arange(0, C)
    y, r, x = q_ * f_up, k_ * f_up, k_ * f_down
    A = tl.where(i[:, None] >= i[None, :], dot(y, tl.trans(x), DT), 0.0)
    return q_, k_, y, r, x, A, f_up, f_down, f_in, f_out, f_all


@jit
def inverse(k, e, f, M, T, K: tl.constexpr, FD: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
            DT: tl.constexpr):
    """M = (I + L)^-1, L = e strict_tril(r x^T), by substitution in fp32: row i of M is e_i - L_i M."""
    n = tl.cdiv(T, C)
    tile, i, kk = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    t = (tile % n) * C + i
    row, ok = tile // n * T + t, t < T
    f_up, f_down, _, _, _ = decays(f, row, kk, ok, FD, C)
    k_ = load(k, row, kk, ok, K)
    L = dot(k_ * f_up, tl.trans(k_ * f_down), DT) * column(e, row, ok, 1.0)
    L = tl.where(i[:, None] > i[None, :], L, 0.0)
    M_ = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for s in range(1, C):
        L_s = tl.sum(tl.where(i[:, None] == s, L, 0.0), 0)
        M_ -= tl.where(i[:, None] == s, tl.sum(L_s[:, None] * M_, 0)[None, :], 0.0)
    store(M, M_, tile * C + i, i, i < C, C)


@jit
def forward(q, k, v, w, e, f, z, M, S_0, o, states, S_T, T, K: tl.constexpr, V: tl.constexpr,
            FD: tl.constexpr, ZD: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DT: tl.constexpr):
    n = tl.cdiv(T, C)
    seq, i, kk = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    S = load(S_0, seq * V + vv, kk, vv < V, K)                                    # [BV, BK]
    for j in range(n):
        t = j * C + i
        row, ok = seq * T + t, t < T
        _, _, y, r, x, A, _, _, f_in, f_out, f_all = letters(q, k, f, row, kk, ok, K, FD, C, DT)
        z_up, z_down, z_in, z_out, z_all = decays(z, row, vv, ok, ZD, C)
        U = load(v, row, vv, ok, V) * column(w, row, ok, 1.0) * z_down
        S_in = tl.trans(S * f_in)
        if states is not None:
            store(states, S, (seq * (n + 1) + j) * V + vv, kk, vv < V, K)
        if e is not None:
            U -= dot(r, S_in, DT) * z_in * column(e, row, ok, 0.0)
            U = dot(load(M, (seq * n + j) * C + i, i, i < C, C), U, DT)
        store(o, (dot(A, U, DT) + dot(y, S_in, DT) * z_in) * z_up, row, vv, ok, V)
        S = S * f_all * tl.trans(z_all) + dot(tl.trans(U * z_out), x * f_out, DT)
    if states is not None:
        store(states, S, (seq * (n + 1) + n) * V + vv, kk, vv < V, K)
    store(S_T, S, seq * V + vv, kk, vv < V, K)


@jit
def states(q, k, e, f, z, M, do, dS_T, after, dS_0, T, K: tl.constexpr, V: tl.constexpr, FD: tl.constexpr,
           ZD: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr):
    """The gradient of the state that each chunk hands on, from the last chunk to the first."""
    n = tl.cdiv(T, C)
    seq, i, kk = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    dS = load(dS_T, seq * V + vv, kk, vv < V, K)
    for back in range(n):
        j = n - 1 - back
        t = j * C + i
        row, ok = seq * T + t, t < T
        _, _, y, r, x, A, _, _, f_in, f_out, f_all = letters(q, k, f, row, kk, ok, K, FD, C, DT)
        z_up, z_down, z_in, z_out, z_all = decays(z, row, vv, ok, ZD, C)
        g = load(do, row, vv, ok, V) * z_up
        store(after, dS, (seq * n + j) * V + vv, kk, vv < V, K)
        dU = dot(tl.trans(A), g, DT) + dot(x * f_out, tl.trans(dS), DT) * z_out
        read = dot(tl.trans(g * z_in), y, DT)
        if e is not None:
            dU = dot(tl.trans(load(M, (seq * n + j) * C + i, i, i < C, C)), dU, DT)
            read -= dot(tl.trans(dU * z_in * column(e, row, ok, 0.0)), r, DT)
        dS = dS * f_all * tl.trans(z_all) + read * f_in
    store(dS_0, dS, seq * V + vv, kk, vv < V, K)


@jit
def tokens(q, k, v, w, e, f, z, M, do, states, after, dq, dk, dv, dw, de, df, dz, T, K: tl.constexpr,
           V: tl.constexpr, FD: tl.constexpr, ZD: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
           BV: tl.constexpr, DT: tl.constexpr):
    """All gradients of the steps of one tile, summed over blocks of value channels."""
    n = tl.cdiv(T, C)
    tile, i, kk = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    seq, j = tile // n, tile % n
    t = j * C + i
    row, ok = seq * T + t, t < T
    lower, strict = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    q_, k_, y, r, x, A, f_up, f_down, f_in, f_out, f_all = letters(q, k, f, row, kk, ok, K, FD, C, DT)
    w_, e_ = column(w, row, ok, 1.0), column(e, row, ok, 0.0)
    dA, dL = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    dy, dx, dr = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    dw_, de_, dz_ = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    dS_S = tl.zeros([1, BK], tl.float32)
    if e is not None:
        M_ = load(M, tile * C + i, i, i < C, C)
    for v_0 in range(0, V, BV):
        vv = v_0 + tl.arange(0, BV)
        z_up, z_down, z_in, z_out, z_all = decays(z, row, vv, ok, ZD, C)
        v_, do_ = load(v, row, vv, ok, V), load(do, row, vv, ok, V)
        S = load(states, (seq * (n + 1) + j) * V + vv, kk, vv < V, K) * f_in
        dS = load(after, tile * V + vv, kk, vv < V, K)
        U, g = v_ * w_ * z_down, do_ * z_up
        dU = dot(tl.trans(A), g, DT) + dot(x * f_out, tl.trans(dS), DT) * z_out
        if e is not None:
            R = dot(r, tl.trans(S), DT) * z_in
            U = dot(M_, U - e_ * R, DT)
            dU = dot(tl.trans(M_), dU, DT)
            dL -= dot(dU, tl.trans(U), DT)
            de_ -= tl.sum(dU * R, 1)
            dr -= dot(dU * z_in * e_, S, DT)
        dA += dot(g, tl.trans(U), DT)
        dy += dot(g * z_in, S, DT)
        dx += dot(U * z_out, dS, DT)
        dU = dU * z_down
        dw_ += tl.sum(dU * v_, 1)
        dU = dU * w_
        store(dv, dU, row, vv, ok, V)
        if f is not None or z is not None:
            dSS = dS * load(states, (seq * (n + 1) + j + 1) * V + vv, kk, vv < V, K)
            dS_S += tl.sum(dSS, 0)[None, :]
        if z is not None:
            o = (dot(A, U, DT) + dot(y, tl.trans(S), DT) * z_in) * z_up
            reads = tl.cumsum(o * do_ - v_ * dU, 0, reverse=True) + tl.sum(dSS, 1)[None, :]
            if ZD > 1:
                store(dz, reads, row, vv, ok, V)
            else:
                dz_ += tl.sum(reads, 1)
    dA = tl.where(lower, dA, 0.0)
    dy = (dy + dot(dA, x, DT)) * f_up
    dx = dx * f_out + dot(tl.trans(dA), y, DT)
    if e is not None:
        dL = tl.where(strict, dL, 0.0)
        de_ += tl.sum(dL * tl.where(strict, dot(r, tl.trans(x), DT), 0.0), 1)
        dL = dL * e_
        dr = (dr + dot(dL, x, DT)) * f_up
        dx += dot(tl.trans(dL), r, DT)
        tl.store(de + row, de_, ok)
    dx = dx * f_down
    store(dq, dy, row, kk, ok, K)
    store(dk, dx + dr, row, kk, ok, K)
    if w is not None:
        tl.store(dw + row, dw_, ok)
    if f is not None:
        reads = tl.cumsum(q_ * dy + k_ * (dr - dx), 0, reverse=True) + dS_S
        if FD > 1:
            store(df, reads, row, kk, ok, K)
        else:
            tl.store(df + row, tl.sum(reads, 1), ok)
    if z is not None and ZD == 1:
        tl.store(dz + row, dz_, ok)


@jit
def vector(p, seq, i, D: tl.constexpr):
    """Row seq of a (sequences, D) tensor, [len(i)] in fp32, 0 outside; [1] for one number; 1 for None."""
    if p is None:
        return tl.full([1], 1.0, tl.float32)
    elif D == 1:
        return tl.load(p + seq + tl.zeros([1], tl.int32)).to(tl.float32)
    else:
        return tl.load(p + seq * D + i, i < D, 0.0).to(tl.float32)


@jit
def one_step(q, k, v, w, e, f, z, S, floor, o, S_new, K: tl.constexpr, V: tl.constexpr, FD: tl.constexpr,
             ZD: tl.constexpr, NORM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LOG_MIN: tl.constexpr):
    """The definition for one step, S read and written once. With NORM = 1, row V of S is n, the keys' sum."""
    seq, kk, vv = tl.program_id(0).to(tl.int64), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    q_, k_ = vector(q, seq, kk, K), vector(k, seq, kk, K)
    v_, w_ = vector(v, seq, vv, V), vector(w, seq, kk, 1)
    S_ = load(S, seq * (V + NORM) + vv, kk, vv < V, K)
    n = tl.load(S + (seq * (V + NORM) + V * NORM) * K + kk, kk < K, 0.0)     # unless NORM, a row of no use
    if f is not None:
        keep = tl.exp(tl.maximum(vector(f, seq, kk, FD), LOG_MIN))
        S_, n = S_ * keep[None, :], n * keep
    if z is not None:
        keep = tl.exp(tl.maximum(vector(z, seq, vv, ZD), LOG_MIN))
        S_ = S_ * keep[:, None]
        if ZD == 1:
            n = n * keep
    u = w_ * v_
    if e is not None:
        u -= vector(e, seq, kk, 1) * tl.sum(S_ * k_[None, :], 1)
    S_, n = S_ + u[:, None] * k_[None, :], n + w_ * k_
    o_ = tl.sum(S_ * q_[None, :], 1)
    if NORM:
        o_ = o_ / tl.maximum(tl.sum(n * q_, 0), floor)
        if tl.program_id(1) == 0:
            tl.store(S_new + (seq * (V + NORM) + V) * K + kk, n, kk < K)
    tl.store(o + seq * V + vv, o_.to(o.dtype.element_ty), vv < V)
    store(S_new, S_, seq * (V + NORM) + vv, kk, vv < V, K)


def blocks(K, V, plain, dtype):
    """Tile sizes and operand type for head sizes K, V; fixed, never tuned at run time. With these `forward`
    has no register on the stack up to K = 128 in bf16 (test_all.py compiles it for sm_80, sm_90)."""
    BK = max(16, triton.next_power_of_2(K))
    DT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    if DT == tl.float16 and not plain:
        DT = tl.bfloat16                                # e^80 is beyond fp16
    if triton.knobs.runtime.interpret:
        DT = tl.float32                                 # the interpreter computes with the bits of bf16
    C = CHUNK if BK <= 64 and DT != tl.float32 else 16
    return dict(C=C, BK=BK, BV=C, DT=DT, num_warps=8)


class Tiles(torch.autograd.Function):
    """`Chunks` on a GPU: any T; q, k, v in any of fp32, fp16, bf16."""
    @staticmethod
    def forward(ctx, q, k, v, w, e, f, z, S):
        q, k, v, w, e, f, z, S = each(lambda x: x.contiguous(), q, k, v, w, e, f, z, S)
        (B, H, T, K), V = q.shape, v.shape[-1]
        size = blocks(K, V, e is f is z is None, v.dtype)
        n, few = triton.cdiv(T, size['C']), {x: size[x] for x in ('C', 'BK', 'DT', 'num_warps')}
        FD, ZD = (0 if g is None else g.shape[-1] for g in (f, z))
        kept = torch.float32 if size['DT'] == tl.float32 else torch.bfloat16
        o, S_T, M, states_ = torch.empty_like(v), torch.empty_like(S), None, None
        if e is not None:
            M = v.new_empty(B * H * n, size['C'], size['C'], dtype=kept)
            inverse[(B * H * n,)](k, e, f, M, T, K, FD, **few)
        if any(ctx.needs_input_grad):
            states_ = v.new_empty(B * H, n + 1, V, K, dtype=kept)
        grid = B * H, triton.cdiv(V, size['BV'])
        forward[grid](q, k, v, w, e, f, z, M, S, o, states_, S_T, T, K, V, FD, ZD, **size)
        ctx.save_for_backward(q, k, v, w, e, f, z, M, states_)
        return o, S_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS_T):
        q, k, v, w, e, f, z, M, states_ = ctx.saved_tensors
        (B, H, T, K), V = q.shape, v.shape[-1]
        size = blocks(K, V, e is f is z is None, v.dtype)
        n = triton.cdiv(T, size['C'])
        sizes = T, K, V, *(0 if g is None else g.shape[-1] for g in (f, z))
        do, dS_T, dS_0 = do.contiguous(), dS_T.contiguous(), torch.empty_like(dS_T)
        after = states_.new_empty(B * H, n, V, K)
        states[(B * H, triton.cdiv(V, size['BV']))](q, k, e, f, z, M, do, dS_T, after, dS_0, *sizes, **size)
        grads = each(torch.empty_like, q, k, v, w, e, f, z)
        tokens[(B * H * n,)](q, k, v, w, e, f, z, M, do, states_, after, *grads, *sizes, **{**size, 'BV': 16})
        return *grads, dS_0


def step_on_cpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False):
    """fastweight.recurrent for a single step, with less around it."""
    dtype, (B, H, _, _) = v.dtype, q.shape
    *rows, S = start(q, k, v, write, erase, log_f, log_z, S, normalise)
    rows = each(lambda x: x.reshape(B * H, 1, -1), *rows)
    rows[5:] = each(torch.exp, *rows[5:])
    o, S_new = fastweight.step(*rows, S.flatten(0, 1))
    return finish(o.view(B, H, 1, -1), normalise, dtype), S_new.view_as(S)


def step_on_gpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False):
    """fastweight.recurrent for a single step, no gradients."""
    (B, H, _, K), V, norm = q.shape, v.shape[-1], int(bool(normalise))
    if S is None:
        S = v.new_zeros(B, H, V + norm, K, dtype=torch.float32)
    q, k, v, write, erase, log_f, log_z, S = each(lambda x: x.contiguous(), q, k, v, write, erase, log_f,
                                                  log_z, S)
    FD, ZD = (0 if g is None else g.shape[-1] for g in (log_f, log_z))
    o, S_new, BK = torch.empty_like(v), torch.empty_like(S), triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), max(1, 4096 // BK))
    one_step[(B * H, triton.cdiv(V, BV))](q, k, v, write, erase, log_f, log_z, S,
                                          FLOOR if normalise is True else float(normalise), o, S_new,
                                          K, V, FD, ZD, norm, BK, BV, LOG_MIN)
    return o, S_new


# ---- one entrance for all machines -------------------------------------------------------------------------
def check(q, k, v, write, erase, log_f, log_z, S, normalise):
    """ValueError unless all shapes fit together and all tensors are floating and on one device."""
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f'q: expected a tensor (B, H, T, K) that is not empty, not {tuple(q.shape)}')
    (B, H, T, K), V = q.shape, v.shape[-1]
    expected = dict(k=(k, K), v=(v, V), write=(write,), erase=(erase,),
                    log_f=(log_f, K, 1), log_z=(log_z, V, 1))
    for name, (x, *ends) in expected.items():
        shapes = [(B, H, T, d) for d in ends] or [(B, H, T)]
        if x is not None and tuple(x.shape) not in shapes:
            raise ValueError(f'{name}: expected {" or ".join(map(str, shapes))}, not {tuple(x.shape)}')
    if S is not None and tuple(S.shape) != (B, H, V + bool(normalise), K):
        raise ValueError(f'S: expected {(B, H, V + bool(normalise), K)}, not {tuple(S.shape)}')
    device = q.device
    for name, x in dict(q=q, k=k, v=v, write=write, erase=erase, log_f=log_f, log_z=log_z, S=S).items():
        if x is not None and (x.device != device or not x.is_floating_point()):
            raise ValueError(f'{name}: expected floating point on {device}, not {x.dtype}, {x.device}')


def on_cpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, chunk=None):
    """fastweight.chunked through `Chunks`. A chunk is at most CHUNK steps where something decays."""
    dtype, T, plain = v.dtype, q.shape[2], log_f is None and log_z is None
    chunk = chunk or (2 * CHUNK if plain and k.shape[-1] >= 64 else CHUNK)
    chunk = chunk if plain else min(chunk, CHUNK)
    *xs, S = start(q, k, v, write, erase, log_f, log_z, S, normalise)
    C = min(chunk, T)
    if pad := -T % C:                                   # steps of zeros: they write nothing and erase nothing
        xs = each(lambda x: F.pad(x, (0, 0, 0, pad) if x.dim() == 4 else (0, pad)), *xs)
    o, S = Chunks.apply(*xs, S, C)
    return finish(o[:, :, :T], normalise, dtype), S


def on_gpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False):
    """fastweight.chunked through `Tiles`."""
    dtype = v.dtype
    *xs, S = start(q, k, v, write, erase, log_f, log_z, S, normalise, cast=False)
    o, S = Tiles.apply(*xs, S)
    return finish(o, normalise, dtype), S


def fault(f, args):
    """Why f must not be trusted with arguments like these on this machine; None if it may. Compilers have
    made wrong kernels without a word, so a small case goes through f and fastweight.chunked, and back."""
    *xs, _, normalise = args
    draw, results, T = torch.Generator().manual_seed(0), [], min(args[0].shape[2], 2 * CHUNK + 3)
    xs = each(lambda x: torch.rand(1, 2, T, *x.shape[3:], generator=draw).to(x), *xs)
    xs[1], xs[5:] = xs[1] / xs[1].shape[-1] ** 0.5, each(torch.neg, *xs[5:])        # short keys, log-decays
    given = [x.requires_grad_() for x in xs if x is not None]
    try:
        for g in (fastweight.chunked, f):
            o, S = g(*xs, None, normalise)
            grads = torch.autograd.grad((o * o).sum() + (S * S).sum(), given) if o.requires_grad else ()
            results.append([o, S, *grads])
    except Exception as e:      # whatever a compiler may raise
        return f'{type(e).__name__}: {(str(e).splitlines() or [""])[0]}'
    limit = 1e-3 if xs[2].dtype == torch.float32 else 3e-2
    errors = [((a - b).float().norm() / (a.float().norm() + 1e-6)).item() for a, b in zip(*results)]
    if not max(errors) < limit:
        return f'results differ from the definition by {max(errors):.1e}'


trusted = {}        # kinds of arguments -> the form that was found right for them


def fastest(*args):
    """The form for such arguments: Triton on an Nvidia GPU, once it has shown that it is right."""
    q, k, v, _, erase, _, log_z, _, normalise = args
    device = q.device.type
    plain = fastweight.chunked if device not in ('cpu', 'cuda') else on_cpu
    plain = step_on_cpu if q.shape[2] == 1 else plain
    if device != 'cuda' or torch.float64 in (q.dtype, k.dtype, v.dtype):
        return plain
    one = plain is step_on_cpu and not torch.is_grad_enabled() and not (normalise and (erase is not None or
                                                                                       log_z is not None))
    kind = (q.device, one, normalise, *(x if x is None else (x.dtype, x.shape[3:]) for x in args[:7]))
    if kind not in trusted:
        f = step_on_gpu if one else on_gpu
        with torch.inference_mode(False), torch.set_grad_enabled(not one):
            why = fault(f, args) if triton else 'there is no triton'
        if why:
            print(f'kernels.py: no Triton for {tuple(q.shape)}, plain torch instead: {why}', file=sys.stderr)
        trusted[kind] = None if why else f
    return trusted[kind] or plain


def chunked(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False):
    """As fastweight.chunked, by the fastest form that works here. ValueError for shapes that do not fit."""
    args = q, k, v, write, erase, log_f, log_z, S, normalise
    check(*args)
    return fastest(*args)(*args)


def step(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False):
    """`chunked` for one step, T = 1."""
    if q.dim() == 4 and q.shape[2] != 1:
        raise ValueError(f'q: expected one step, (B, H, 1, K), not {tuple(q.shape)}; chunked takes more')
    return chunked(q, k, v, write, erase, log_f, log_z, S, normalise)
