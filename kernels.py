"""The recurrence on every machine: Triton kernels for GPUs, and `chunked`, which picks the fastest form.

    o, S = chunked(q, k, v, write, erase, log_f, log_z, S, normalise, floor)     as fastweight.chunked

The forms for a CPU are in fast/chunks.py. Read the comment at its top first: the letters below are explained
there, and the kernels compute the rows of its table of gradients. test_all.py compares every form with
fastweight.recurrent. Without this file everything but bench.py and the tests still works, more slowly.
"""
import contextlib
import os
import sys
import types

import torch

import fastweight
from fast.chunks import if_given, on_cpu, step_over
from fastweight import FLOOR, LOG_MIN, finish, head_and_channels, l2, start

triton = None                       # only GPUs need it, to be fast
tl = types.SimpleNamespace(constexpr=None)
if torch.cuda.is_available() or 'TRITON_INTERPRET' in os.environ:       # its import is slow
    with contextlib.suppress(ImportError):
        import triton
        import triton.language as tl


# ---- GPU: the same letters, in four Triton kernels ---------------------------------------------------------
# A tile is one chunk of C steps of one sequence. Many programs run a kernel at once. Two kernels have a
# program for each tile. The others have one for each sequence and block of BV value channels. Such a program
# goes through the chunks, one after the other, and keeps its part of S in registers.
#
#   inverse_kernel             all tiles at once            reads k e f z       writes N
#   forward_kernel             chunk after chunk            q k v w e f z N     o, U, S before each chunk
#   backward_states_kernel     from the last chunk back     q k e f z N do      dY, dS after each chunk
#   backward_inputs_kernel     all tiles at once            all but N           gradients of q k v w e f z
#
# f, z, w and e have FD, ZD, WD and ED channels (1: one number for all, 0: there is no such gate). A decay per
# head is z with ZD = 1. The sum of the keys is one more value channel; n is the number of chunks, N a matrix.
# Diagonals are kept apart, in fp32: D = q.k of A, and the ones of M = I + N.
# Operands of a product have type DT (bf16 or fp32), but fp32 where I + L is inverted. Sums are fp32.
def jit(f):
    """triton.jit, if there is Triton. One compiled kernel serves all lengths T."""
    if triton is None:
        return f
    return triton.jit(f, do_not_specialize=['T'])


@jit
def steps_of(seq, j, T, C: tl.constexpr):
    """Chunk j of a sequence: its rows in a (B H T, .) tensor, and which of them lie inside the text."""
    t = j * C + tl.arange(0, C)
    return seq * T + t, t < T


@jit
def operand(x, DT: tl.constexpr):
    """x in the type of a product's operands."""
    return x.to(DT)


@jit
def dot(a, b, DT: tl.constexpr):
    """a b with operands of type DT and sums in fp32. For fp32, three products of tf32 are used."""
    precision: tl.constexpr = 'tf32x3' if DT == tl.float32 else None
    return tl.dot(operand(a, DT), operand(b, DT), input_precision=precision)


@jit
def load_tile(p, row, col, ok, D: tl.constexpr):
    """Tile [row, col] of a (..., D) tensor, in fp32; 0 outside."""
    inside = ok[:, None] & (col < D)[None, :]
    return tl.load(p + row[:, None] * D + col[None, :], inside, 0.0).to(tl.float32)


@jit
def store_tile(p, x, row, col, ok, D: tl.constexpr):
    """The inverse of `load_tile`, in the type of p."""
    inside = ok[:, None] & (col < D)[None, :]
    tl.store(p + row[:, None] * D + col[None, :], x.to(p.dtype.element_ty), inside)


@jit
def gate(p, row, col, ok, D: tl.constexpr):
    """A gate of D channels, [C, d]. If D is 1, one number per step, [C, 1]; for None, ones [1, 1]."""
    if p is None:
        return tl.full([1, 1], 1.0, tl.float32)
    else:
        if D == 1:
            col = tl.arange(0, 1)
        return load_tile(p, row, col, ok, D)


@jit
def of_channels(x, D: tl.constexpr):
    """The gradient of a gate of D channels, from gradients x [C, d] per channel."""
    if D == 1:
        return tl.sum(x, 1)[:, None]
    else:
        return x


@jit
def lower(x, C: tl.constexpr):
    """x [C, C] below the diagonal, else 0. Entries above may be infinite."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] > i[None, :], x, 0.0)


@jit
def decays(p, row, col, ok, D: tl.constexpr, C: tl.constexpr):
    """fastweight.factors of one tile: e^(a - m), e^(m - a) [C, d]; e^m, e^(a_C - m), e^(a_C) [1, d]. Of a
    decay per head: 1, 1 [1, 1], e^a, e^(a_C - a) [C, 1], e^(a_C) [1, 1], see `decayed`. None gives ones
    [1, 1]; the compiler removes such products."""
    one = tl.full([1, 1], 1.0, tl.float32)
    if p is None:
        return one, one, one, one, one
    else:
        log_p = gate(p, row, col, ok, D)
        a = tl.cumsum(log_p, 0)
        end = tl.sum(log_p, 0)[None, :]
        if D == 1:
            return one, one, tl.exp(a), tl.exp(end - a), tl.exp(end)
        else:
            to_middle = tl.arange(0, C)[:, None] <= C // 2
            m = tl.sum(tl.where(to_middle, log_p, 0.0), 0)[None, :]
            return tl.exp(a - m), tl.exp(m - a), tl.exp(m), tl.exp(end - m), tl.exp(end)


@jit
def decayed(x, z, row, ok, ZD: tl.constexpr, C: tl.constexpr):
    """x [C, C] below the diagonal times e^(a_t - a_s) of a decay per head, fastweight.pairs; else 0. Where
    z is not per head, x there. Entries above may be infinite."""
    x = lower(x, C)
    if ZD == 1:
        a = tl.cumsum(tl.load(z + row, ok, 0.0).to(tl.float32), 0)
        x *= tl.exp(tl.minimum(a[:, None] - a[None, :], 0.0))
    return x


@jit
def letters(q, k, e, f, z, row, kk, ok, K: tl.constexpr, ED: tl.constexpr, FD: tl.constexpr,
            ZD: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """The letters of one tile: y, r, x [C, BK]; A below the diagonal [C, C]; its diagonal D [C, 1]; and the
    factors f_in, f_out, f_all for the state"""
    f_up, f_down, f_in, f_out, f_all = decays(f, row, kk, ok, FD, C)
    q_ = load_tile(q, row, kk, ok, K)
    k_ = load_tile(k, row, kk, ok, K)
    y = q_ * f_up
    x = k_ * f_down
    r = k_ * f_up * gate(e, row, kk, ok, ED)
    A = decayed(dot(y, tl.trans(x), DT), z, row, ok, ZD, C)
    D = tl.sum(q_ * k_, 1)[:, None]
    return y, r, x, A, D, f_in, f_out, f_all


@jit
def inverse_kernel(k, e, f, z, N, T, K: tl.constexpr, V: tl.constexpr, WD: tl.constexpr, ED: tl.constexpr,
                   FD: tl.constexpr, ZD: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                   DT: tl.constexpr):
    """N = (I + L)^-1 - I, L = tril(r x^T, -1). First the blocks of 16 on the diagonal, all together, by
    substitution: row s of X is row s of I - L X, which needs only the rows above s. Then two blocks are
    joined as in fast.chunks.inverted."""
    tile = tl.program_id(0).to(tl.int64)
    n = tl.cdiv(T, C)
    row, ok = steps_of(tile // n, tile % n, T, C)
    tl.static_assert(C <= 32)                                   # two blocks of 16, joined once
    _, r, x, _, _, _, _, _ = letters(k, k, e, f, z, row, tl.arange(0, BK), ok, K, ED, FD, ZD, C, DT)
    L = decayed(dot(r, tl.trans(x), DT), z, row, ok, ZD, C)
    c = tl.arange(0, C)
    b = tl.arange(0, C // 16)
    i = tl.arange(0, 16)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    own = tl.sum(tl.where(diagonal, tl.reshape(L, [C // 16, 16, C // 16, 16]), 0.0), 2)
    X = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, tl.zeros([C // 16, 16, 16], tl.float32))
    for s in range(1, 16):
        here = (i == s)[None, :, None]
        row_s = tl.sum(tl.sum(tl.where(here, own, 0.0), 1)[:, :, None] * X, 1)
        X -= tl.where(here, row_s[:, None, :], 0.0)
    M = tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), [C, C])
    if C > 16:
        between = tl.where((c // 16)[:, None] > (c // 16)[None, :], L, 0.0)
        M -= dot(M, dot(between, M, tl.float32), tl.float32)
    store_tile(N, lower(M, C), tile * C + c, c, c < C, C)


# for each sequence and each block of BV value channels, in parallel:
#     S = S_0                                                   a [BV, BK] part, in registers all the time
#     for each chunk, one after the other:                      reads q, k, v, w, e, f, z, N
#         U = Y + N Y, Y = z_down * w * v - z_in * (r S_in^T)
#         o = z_up (D U + A U + z_in y S_in^T)                  writes o, and U and S for the backward
#         S = f_all z_all S + (z_out U)^T (f_out x)
@jit
def forward_kernel(q, k, v, w, e, f, z, N, S_0, o, written, before, S_T, T, K: tl.constexpr, V: tl.constexpr,
                   WD: tl.constexpr, ED: tl.constexpr, FD: tl.constexpr, ZD: tl.constexpr, C: tl.constexpr,
                   BK: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr):
    """o for all steps of a sequence, the state before each chunk, and the last state."""
    n = tl.cdiv(T, C)
    seq = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    S = load_tile(S_0, seq * V + vv, kk, vv < V, K)
    for j in range(n):
        tile = seq * n + j
        row, ok = steps_of(seq, j, T, C)
        z_up, z_down, z_in, z_out, z_all = decays(z, row, vv, ok, ZD, C)
        y, r, x, A, D, f_in, f_out, f_all = letters(q, k, e, f, z, row, kk, ok, K, ED, FD, ZD, C, DT)
        store_tile(before, S, tile * V + vv, kk, vv < V, K)
        S_in = tl.trans(S * f_in)
        U = load_tile(v, row, vv, ok, V) * gate(w, row, vv, ok, WD) * z_down
        if e is not None:
            U -= dot(r, S_in, DT) * z_in
            N_j = load_tile(N, tile * C + c, c, c < C, C)
            U += dot(N_j, U, DT)
            store_tile(written, U, row, vv, ok, V)
        read = D * U + dot(A, U, DT) + dot(y, S_in, DT) * z_in
        store_tile(o, read * z_up, row, vv, ok, V)
        S = S * f_all * tl.trans(z_all) + dot(tl.trans(U * z_out), x * f_out, DT)
    store_tile(S_T, S, seq * V + vv, kk, vv < V, K)


# for each sequence and each block of BV value channels, in parallel:
#     dS = dS_T
#     for each chunk, the last first:                           reads q, k, e, f, z, N, do   writes dS, dY
#         dU = D g + A^T g + z_out (f_out x dS^T), g = z_up do
#         dY = dU + N^T dU
#         dS = f_all z_all dS + f_in ((z_in g)^T y - (z_in dY)^T r)
@jit
def backward_states_kernel(q, k, e, f, z, N, do, dS_T, d_written, after, dS_0, T, K: tl.constexpr,
                           V: tl.constexpr, WD: tl.constexpr, ED: tl.constexpr, FD: tl.constexpr,
                           ZD: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                           DT: tl.constexpr):
    """The gradient of the state after each chunk, from the last chunk to the first, and dY."""
    n = tl.cdiv(T, C)
    seq = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    dS = load_tile(dS_T, seq * V + vv, kk, vv < V, K)
    for back in range(n):
        j = n - 1 - back
        tile = seq * n + j
        row, ok = steps_of(seq, j, T, C)
        z_up, _, z_in, z_out, z_all = decays(z, row, vv, ok, ZD, C)
        y, r, x, A, D, f_in, f_out, f_all = letters(q, k, e, f, z, row, kk, ok, K, ED, FD, ZD, C, DT)
        g = load_tile(do, row, vv, ok, V) * z_up
        store_tile(after, dS, tile * V + vv, kk, vv < V, K)
        read = dot(tl.trans(g * z_in), y, DT)
        if e is not None:
            dU = D * g + dot(tl.trans(A), g, DT) + dot(x * f_out, tl.trans(dS), DT) * z_out
            N_j = load_tile(N, tile * C + c, c, c < C, C)
            dY = dU + dot(tl.trans(N_j), dU, DT)
            store_tile(d_written, dY, row, vv, ok, V)
            read -= dot(tl.trans(dY * z_in), r, DT)
        dS = dS * f_all * tl.trans(z_all) + read * f_in
    store_tile(dS_0, dS, seq * V + vv, kk, vv < V, K)


@jit
def passing(inside, out):
    """What passes the decay of step t: reads minus writes inside the chunk from t on, plus what was written
    before t and leaves the chunk. Both are [C, d]; channels are summed later, as Triton 3.6 scans no [C, 1]
    sum."""
    return tl.cumsum(inside, 0, reverse=True) + tl.cumsum(out, 0) - out


# One program computes all gradients of one tile: of q, k, v and the gates, for C steps of one sequence. It
# needs no other tile, because the two kernels above have stored S before the chunk and dS' after it (in the
# code, S and dS).
#
# Some gradients in the table of fast/chunks.py have V columns, one for each value channel. The others are
# sums over value channels. So there are two parts. A loop over blocks of BV value channels finishes those
# with V columns, and adds its share to the sums. Then come the gradients that need the whole sums:
#
# for each tile, in parallel:
#     y, r, x, A, D again, from q, k, e, f, z
#     for each block of BV value channels:                      reads v, w, z, do, U, dY, S, dS'
#         g = z_up do
#         dY as stored; if nothing is erased, there is none: then D g + A^T g + z_out (f_out x dS'^T)
#         dL -= dY U^T                      dr -= (z_in dY) S_in
#         dA += g U^T                       dy += (z_in g) S_in                   dD += diagonal of g U^T
#         dx_out += (z_out U) dS'                               the part of dx for what leaves the chunk
#         dw, dv                                                written; dw per head is a sum, written below
#         dlog z                                                written, if it is per value channel
#     dA, dL = their parts below the diagonal
#     dy += dA x                            dr += dL x
#     dx = dA^T y + dL^T r                                      the part of dx for what stays in the chunk
#     dx_out = f_out dx_out
#     dlog f from y dy + r dr - x dx, x dx_out and S dS'        written; and dlog z, if it is per head
#     de = k f_up dr                                            written
#     dq = f_up dy + dD k                                       written
#     dk = f_down (dx + dx_out) + e f_up dr + dD q              written
#
# Two things differ from the table. A has no diagonal here: that is D, which has a gradient dD of its own. And
# dlog f and dlog z are differences of reads and writes. What a step reads of its own value passes no decay,
# so in the table it cancels. Here it is left out, and what leaves the chunk is summed from the chunk's start
# (see `passing`), because in bf16 large numbers would not cancel well.
@jit
def backward_inputs_kernel(q, k, v, w, e, f, z, do, written, d_written, before, after, dq, dk, dv, dw, de, df,
                           dz, T, K: tl.constexpr, V: tl.constexpr, WD: tl.constexpr, ED: tl.constexpr,
                           FD: tl.constexpr, ZD: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                           BV: tl.constexpr, DT: tl.constexpr):
    """All gradients of the steps of one tile."""
    tile = tl.program_id(0).to(tl.int64)
    n = tl.cdiv(T, C)
    row, ok = steps_of(tile // n, tile % n, T, C)
    kk = tl.arange(0, BK)
    y, r, x, A, D, f_in, f_out, f_all = letters(q, k, e, f, z, row, kk, ok, K, ED, FD, ZD, C, DT)
    dA = tl.zeros([C, C], tl.float32)
    dL = tl.zeros([C, C], tl.float32)
    dy = tl.zeros([C, BK], tl.float32)
    dx_out = tl.zeros([C, BK], tl.float32)
    dr = tl.zeros([C, BK], tl.float32)
    dD = tl.zeros([C, 1], tl.float32)
    dw_ = tl.zeros([C, 1], tl.float32)
    kept = tl.zeros([1, BK], tl.float32)
    if ZD <= 1:                                                 # the same for all value channels
        z_up, z_down, z_in, z_out, z_all = decays(z, row, kk, ok, ZD, C)
    for v_0 in range(0, V, BV):
        vv = v_0 + tl.arange(0, BV)
        if ZD > 1:
            z_up, z_down, z_in, z_out, z_all = decays(z, row, vv, ok, ZD, C)
        v_ = load_tile(v, row, vv, ok, V)
        S = load_tile(before, tile * V + vv, kk, vv < V, K)
        S_in = S * f_in
        dS = load_tile(after, tile * V + vv, kk, vv < V, K)
        stays = dS * S * f_all * tl.trans(z_all)
        kept += tl.sum(stays, 0)[None, :]
        g = load_tile(do, row, vv, ok, V) * z_up
        w_ = gate(w, row, vv, ok, WD)
        Y = v_ * w_ * z_down                                    # Y without what is erased
        out = dot(x * f_out, tl.trans(dS), DT) * z_out
        U = Y
        dY = D * g + dot(tl.trans(A), g, DT) + out
        if e is not None:
            U = load_tile(written, row, vv, ok, V)
            dY = load_tile(d_written, row, vv, ok, V)
            dL -= dot(dY, tl.trans(U), DT)
            dr -= dot(dY * z_in, S_in, DT)
        dA += dot(g, tl.trans(U), DT)
        dD += tl.sum(g * U, 1)[:, None]
        dy += dot(g * z_in, S_in, DT)
        dx_out += dot(U * z_out, dS, DT)
        d_given = dY * z_down                                   # gradient of w * v
        if WD > 1:
            store_tile(dw, d_given * v_, row, vv, ok, V)
        else:
            dw_ += tl.sum(d_given * v_, 1)[:, None]
        store_tile(dv, d_given * w_, row, vv, ok, V)
        if ZD > 1:
            o_ = D * (U - Y) + dot(A, U, DT) + dot(y, tl.trans(S_in), DT) * z_in
            inside = g * o_ - Y * (dY - D * g - out)
            later = tl.sum((U - Y) * out, 0) + tl.sum(stays, 1)
            store_tile(dz, passing(inside, Y * out) + later[None, :], row, vv, ok, V)
    f_up, f_down, _, _, _ = decays(f, row, kk, ok, FD, C)
    q_ = load_tile(q, row, kk, ok, K)                           # loaded again: kept all the time, they
    k_ = load_tile(k, row, kk, ok, K)                           # would use up the registers
    dA = decayed(dA, z, row, ok, ZD, C)
    dy += dot(dA, x, DT)
    dx = dot(tl.trans(dA), y, DT)
    if e is not None:
        dL = decayed(dL, z, row, ok, ZD, C)
        dr += dot(dL, x, DT)
        dx += dot(tl.trans(dL), r, DT)
    dx_out = dx_out * f_out
    if f is not None or ZD == 1:
        inside = operand(y, DT) * dy + operand(r, DT) * dr - operand(x, DT) * dx
        out = x * dx_out
        passed = passing(inside, out) + kept
        if f is not None:
            store_tile(df, of_channels(passed, FD), row, kk, ok, FD)
        if ZD == 1:
            store_tile(dz, of_channels(passed, 1), row, kk, ok, 1)
    if WD == 1:
        store_tile(dw, dw_, row, tl.arange(0, 1), ok, 1)
    looked = dr * f_up
    if e is not None:
        store_tile(de, of_channels(k_ * looked, ED), row, kk, ok, ED)
        looked *= gate(e, row, kk, ok, ED)
    store_tile(dq, dy * f_up + dD * k_, row, kk, ok, K)
    store_tile(dk, (dx + dx_out) * f_down + looked + dD * q_, row, kk, ok, K)


MAX_K = 256     # features per key in bf16, half of it in fp32: with more, a tile does not fit


def tiles(q, v, w, e, f, z):
    """The sizes of a kernel. They are not tuned at run time. Chunks are shorter in fp32. Raises if there can
    be no kernel."""
    K = q.shape[-1]
    if triton is None:
        raise ImportError('there is no triton')
    exact = v.dtype == torch.float32
    most = MAX_K // 2 if exact else MAX_K
    if K > most:
        raise ValueError(f'keys have {K} features, kernels take up to {most} in {v.dtype}')
    BK = max(16, triton.next_power_of_2(K))
    C = 16 if exact else 32
    DT = tl.float32
    if not exact and not triton.knobs.runtime.interpret:
        DT = tl.bfloat16                                # the interpreter would compute with the bits of bf16
    WD, ED, FD, ZD = [0 if x is None else x.shape[-1] for x in (w, e, f, z)]
    if FD == 1:
        raise ValueError('kernels take no decay per head beside one per value channel')
    how = dict(num_stages=3, num_warps=4)
    if BK > 64:
        # three chunks at once take more shared memory than an RTX 4090 has
        how['num_stages'] = 2
    if BK > 128:
        # four warps have too few registers; of eight, the compiler for an A100 uses 32 if we give no number
        how.update(num_warps=8, maxnreg=255)
    return dict(K=K, V=v.shape[-1], WD=WD, ED=ED, FD=FD, ZD=ZD, C=C, BK=BK, BV=C, DT=DT, **how)


class Tiles(torch.autograd.Function):
    """As fast.chunks.Chunks, on a GPU, for any T. q, k, v are fp32 or bf16. All tensors are contiguous.
    normalise: o is still to be divided, so it is fp32."""
    @staticmethod
    def forward(ctx, q, k, v, w, e, f, z, S, normalise=False):
        B, H, T, K = q.shape
        V = v.shape[-1]
        size = tiles(q, v, w, e, f, z)
        C = size['C']
        n = triton.cdiv(T, C)
        grid = B * H, triton.cdiv(V, size['BV'])
        N = U = None
        with torch.cuda.device_of(q):
            if e is not None:
                N = v.new_empty(B * H * n, C, C)
                U = v.new_empty(v.shape, dtype=torch.float32)
                fewer_warps = dict(size, num_warps=size['num_warps'] // 4)      # for short rows, one by one
                inverse_kernel[(B * H * n,)](k, e, f, z, N, T, **fewer_warps)
            o = torch.empty_like(v, dtype=torch.float32 if normalise else v.dtype)
            before = v.new_empty(B * H, n, V, K)
            S_T = torch.empty_like(S)
            forward_kernel[grid](q, k, v, w, e, f, z, N, S, o, U, before, S_T, T, **size)
        ctx.save_for_backward(q, k, v, w, e, f, z, N, U, before)
        ctx.how = grid, n, size
        return o, S_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        q, k, v, w, e, f, z, N, U, before = ctx.saved_tensors
        grid, n, size = ctx.how
        T = q.shape[2]
        do = do.contiguous()
        dS = dS.contiguous()                            # else dS_0, too, would have its strides
        dS_0 = torch.empty_like(dS)
        after = torch.empty_like(before)
        dY = if_given(torch.empty_like, U)
        given = q, k, v, w, e, f, z
        gradients = [if_given(torch.empty_like, x) for x in given]
        with torch.cuda.device_of(q):
            backward_states_kernel[grid](q, k, e, f, z, N, do, dS, dY, after, dS_0, T, **size)
            larger = dict(size, num_warps=8)
            if size['ZD'] > 1:                          # else the compiler gives 32 registers, and spills
                larger.update(maxnreg=255, BV=2 * size['BV'])
            backward_inputs_kernel[(grid[0] * n,)](*given, do, U, dY, before, after, *gradients, T, **larger)
        return *gradients, dS_0, None


def on_gpu(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR):
    """fastweight.chunked through `Tiles`. Kernels convert what they load to fp32, so bf16 inputs stay as they
    are. A decay per head takes the place of z; decays per channel are bounded as in `on_cpu`."""
    dtype = v.dtype
    q, k, v, w, e, log_f, log_z, S = start(q, k, v, write, erase, log_f, log_z, S, normalise,
                                           converts=False)
    S = S.float()
    if normalise:
        c = v.detach().float().mean(2, keepdim=True)    # a mean moves with its values. Were they far from 0,
        c[..., -1] = 0                                  # gradients of q would cancel to noise in bf16
        v = v - c
        S = S - c.mT * S[:, :, -1:]
    if dtype != torch.float32:
        v = v.bfloat16()                    # for fp16, too: it ends at 65,504, and e^80 is larger
    log_h, log_f, log_z = head_and_channels(log_f, log_z)
    if log_z is None:
        log_z = log_h
    elif log_h is not None:
        log_f = log_h                                   # `tiles` refuses it
    if log_f is None and v.dtype == torch.bfloat16:     # otherwise they are rounded after the decays
        q = q.bfloat16()
        k = k.bfloat16()
    given = q, k, v, w, e, log_f, log_z, S
    o, S = Tiles.apply(*(if_given(torch.Tensor.contiguous, x) for x in given), normalise)
    if normalise:
        o = o + c * o[..., -1:]
        S = S + c.mT * S[:, :, -1:]
    return finish(o, normalise, floor, dtype), S


# ---- the same function on every machine --------------------------------------------------------------------
# `chunked` picks a form: is it a single step, is there an Nvidia GPU? A Triton form must first reproduce
# fastweight.recurrent in a small test on this machine, for compilers have silently made wrong kernels.
VERDICTS = {}           # of `trusted`, per form and kind of arguments


def example(kinds, normalise, device):
    """Random arguments for a recurrence. kinds: (name, dtype, channels) of q, k, v and the gates."""
    V = next(channels[0] for name, _, *channels in kinds if name == 'v')
    heads = 2
    if device.type == 'cuda':                           # fill the GPU: some faults show only then
        heads = 2 * (72 // max(1, V // 64))
    draw = torch.Generator().manual_seed(0)
    given = {}
    for name, dtype, *channels in kinds:
        x = torch.rand(1, heads, 67, *channels, generator=draw)
        if name.startswith('log'):
            x[:, ::2] *= -0.1
            x[:, 1::2] *= -28 if channels in ([], [1]) else LOG_MIN     # half of the heads forget fast
        elif name in 'qkv' and not normalise:           # normalise needs features >= 0
            x -= 0.5
        given[name] = x.to(device, dtype)
    given['k'] = l2(given['k'])                         # with longer keys, delta's state explodes
    S = torch.rand(1, heads, V + normalise, given['k'].shape[-1], generator=draw)
    given['S'] = S.to(device)
    return given


def largest_error(form, given, normalise):
    """The relative error of a form's worst head against the definition in fp64, in o, S and the gradients of
    a scalar made from both. It is relative to that head's size, or to the mean size of its kind where that is
    larger, heads that forget fast or the others: in one head, a gradient may cancel to nearly nothing."""
    results = []
    for f, dtype in (form, None), (fastweight.recurrent, torch.float64):
        leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in given.items()}
        o, S = f(**leaves, normalise=normalise)
        S_T = S.mT.contiguous()                         # so the gradient of S arrives transposed
        gradients = torch.autograd.grad((o * o).sum() + (S_T * S_T).sum(), list(leaves.values()))
        results.append([o, S, *gradients])
    errors = []
    for x, y in zip(*results):
        error, size = (z.flatten(2).norm(dim=-1).unflatten(1, (-1, 2)) for z in (x - y, y))
        by_head = error / (size.maximum(size.mean(1, keepdim=True)) + 1e-6)
        errors.append(by_head.max())
    return torch.stack(errors).max().item()             # NaN if one of them is


@torch.inference_mode(False)
def trusted(form, given, normalise):
    """Whether a Triton form may be used: whether it agrees with the definition for arguments of this kind. If
    not, the fault is printed, once. The caller's settings, such as autocast, do not matter."""
    device = given['q'].device
    kinds = [(name, x.dtype, *x.shape[3:]) for name, x in given.items() if x is not None and name != 'S']
    case = form, device, normalise, *kinds
    if case in VERDICTS:
        return VERDICTS[case]
    exact = {dtype for _, dtype, *_ in kinds} == {torch.float32}    # else a gradient is rounded to bf16
    limit = 1e-3 if exact else 3e-2
    fault = ''
    debug_mode = torch.get_deterministic_debug_mode()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)    # fills new memory with NaN, which
        given = example(kinds, normalise, device)                   # shows what a kernel left unwritten
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            error = largest_error(form, given, normalise)
        if not error < limit:                           # false for NaN
            fault = f'ArithmeticError: results differ from the definition by {error:.1e}'
    except torch.OutOfMemoryError:                      # no verdict: the next call tries again
        return False
    except Exception as e:          # noqa: BLE001  a compiler may raise anything
        why = str(e).partition('\n')[0]
        fault = f'{type(e).__name__}: {why}'
    finally:
        torch.set_deterministic_debug_mode(debug_mode)
    if fault:
        print(f'kernels.py: plain torch instead of Triton: {fault}', file=sys.stderr)
    VERDICTS[case] = not fault
    return VERDICTS[case]


def chunked(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR):
    """As fastweight.chunked, in the fastest form that works here."""
    given = dict(q=q, k=k, v=v, write=write, erase=erase, log_f=log_f, log_z=log_z, S=S)
    double = torch.float64 in (q.dtype, k.dtype, v.dtype)
    fastest = on_cpu
    if q.shape[2] == 1 and not torch.is_grad_enabled():
        fastest = step_over
    elif q.is_cuda and not double and trusted(on_gpu, given, normalise):
        fastest = on_gpu
    return fastest(**given, normalise=normalise, floor=floor)
