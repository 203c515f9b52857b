"""The recurrence in chunks, with a hand-written backward: what runs on a CPU. Its mathematics comes first.

    o, S = on_cpu(q, k, v, write, erase, log_f, log_z, S, normalise, floor)         as fastweight.chunked
    o, S = step_over(q, k, v, ...)          a single step without gradients         as fastweight.recurrent
"""
import collections
import functools
import itertools

import torch
import torch.nn.functional as F

from fastweight import FLOOR, factors, finish, full_precision, head_and_channels, pairs, start

# The four steps of fastweight.chunked, in its letters. A tensor is (BH, n, C, .): B H sequences of n
# chunks of C steps. f and e scale the channels of keys: f the columns of S. z and w scale those of values: z
# the rows of S. f_all = f_in f_out is what is left after the whole chunk, z_all likewise. A decay per head
# (see `pairs`) is not shown: A, L, dA, dL get h_ts, what meets S gets h_in, f_out x gets h_out, f_all h_all.
#
#   y = f_up q     r = f_up e k     x = f_down k        rows; decays count from the chunk's middle
#   A = tril(y x^T)    L = tril(r x^T, -1)    M = (I + L)^-1
#   U = M (z_down w v)    W = -M (f_in r)               what is written if S = 0, and how it depends on S: in
#                                                       the end U = M Y, Y = z_down w v - z_in (r S_in^T)
#   S' = f_all z_all S + z_all (S W^T) (f_out x) + (z_out U)^T (f_out x)    the chunks one after the other
#   U <- U + z_in (W S^T)                               what is written
#   o = z_up (A U + z_in (y S_in^T))                    S_in = f_in S, the state as the middle step sees it
#
# S' is z_all S times P = diag(f_all) + W^T (f_out x), plus a term without S. P needs no state, so the loop
# over the chunks has little to do. The backward goes through these lines from bottom to top. A product A U
# has the gradients dA = g U^T and dU = A^T g, if g is that of the result. From (I + L) U = Y follow
# dY = M^T dU and dL = -dY U^T. dX is the gradient of X; do and dS' are given:
#
#   gradient   shape          equation
#   g          (C, V)         z_up do                              of what is summed up in o
#   dA         (C, C)         tril(g U^T)
#   dS         (V, K)         (z_all dS') P^T + f_in (z_in g)^T y + (z_in A^T g)^T W    the last chunk first
#   dU         (C, V)         A^T g + z_out (f_out x dS'^T)
#   dY         (C, V)         M^T dU                               of Y = (I + L) U; without e, dU
#   dL         (C, C)         -tril(dY U^T, -1)
#   dr         (C, K)         dL x - (z_in dY) S_in
#   dx         (C, K)         dA^T y + dL^T r + f_out ((z_out U) dS')
#   dq         (C, K)         f_up (dA x + (z_in g) S_in)
#   dk         (C, K)         f_down dx + e f_up dr                written, and looked for
#   de         (C, K)         k * f_up dr                          * by element
#   dv, dw     (C, V)         w z_down dY, v * z_down dY
#   dlog f     (C, K)         q * dq + k * (e f_up dr - f_down dx), summed from t to the chunk's end, plus
#                             dS' * S', summed over values
#   dlog z     (C, V)         o * do - v * dv, the same, plus dS' * S', summed over keys
#
# dlog f comes without the gradients of f_up and f_down. Let a be the running sum of log f. It occurs only in
# exp(a_s) q_s, exp(a_s) e_s k_s, exp(-a_s) k_s and, at the chunk's end, in S'. So its gradient is q * dq plus
# the k terms of the table, and for the end dS' * S'. log f_t is part of a_s for all s >= t: sum from t on
# (GLA 2023, appendix C). So no gradient of a key factor is multiplied by value factors, and a chunk may have
# 32 steps. At -5 per step, f_up and f_down stay within e^+-80. Above the diagonal y x^T, r x^T, g U^T may
# then be infinite, so they are masked before anything is summed. What else carries such a factor until its
# inverse comes, as A U does, must stay below e^8 = 3,000 without it, or fp32 ends.
#
# Chunks are processed one segment at a time. All chunks of a long text together would not fit into the CPU's
# caches, and the backward would keep them all. `forward_of` returns last what the backward needs of a
# segment. Only the last few segments keep it. The others keep just the state they begin with, and their
# forward is computed again.
CHUNK = 32              # steps; `on_cpu` says where more or fewer are better
NUMBERS = 2 ** 18       # numbers per tensor in a segment: 1 MB in fp32
KEPT_SEGMENTS = 8       # segments that keep what the backward needs
INSIDE = 19             # so many tensors each, see `forward_of`; None for what is absent
NO_DECAY = None, None, None, None       # instead of `factors`, to compute nothing for absent decays


def times(x, *gates):
    """The product of all that are not None; None if there is none."""
    for y in gates:
        if x is None:
            x = y
        elif y is not None:
            x = x * y
    return x


def if_given(f, x):
    """f(x), or None for an absent gate."""
    if x is None:
        return None
    return f(x)


def inverted(L):
    """(I + L)^-1 for strictly lower triangular L (.., C, C). Entries on and above the diagonal are ignored.
    The two halves are inverted together, because products are faster than a solver for long rows.

        (I + A    0  )^-1  =  (  A'      0 )          A' = (I + A)^-1,   B' = (I + B)^-1
        (  E    I + B)        (-B' E A'  B')"""
    C = L.shape[-1]
    if C <= 16 or C % 2:
        eye = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L)
        return torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    h = C // 2
    E = L[..., h:, :h]
    A, B = inverted(torch.stack([L[..., :h, :h], L[..., h:, h:]]))
    top = F.pad(A, (0, h))
    bottom = torch.cat([-(B @ E @ A), B], -1)
    return torch.cat([top, bottom], -2)


def walk(S, own, f_all, z_all, W, x_out, back=False):
    """S' = z_all (f_all S + (S W^T) x_out) + own, one chunk after the other.
    S (BH, V, K)   own (BH, n, V, K)   f_all (BH, n, 1, K|1)   z_all (BH, n, 1, V|1)
    x_out = f_out x (BH, n, C, K)   W (BH, n, C, K), or None if nothing is erased
    back: the same for gradients of the states, from the last chunk to the first
    ->  the S before each chunk (BH, n, V, K) (with back, after it), and the last S'"""
    _, n, V, K = own.shape
    erases = W is not None
    order = range(n)
    if back:
        order = reversed(order)
        W, x_out = x_out, W
    P = None
    if erases and K <= V:    # then the loop has one product per chunk; with more features P is too large
        P = W.mT @ x_out
        P.diagonal(dim1=2, dim2=3).add_(1.0 if f_all is None else f_all.squeeze(2))
    states = torch.empty_like(own)
    for j in order:
        states[:, j] = S
        if z_all is not None:
            S = S * z_all[:, j].mT
        if P is not None:
            S = torch.baddbmm(own[:, j], S, P[:, j])
            continue
        kept = S
        if f_all is not None:
            kept = S * f_all[:, j]
        if erases:
            kept = torch.baddbmm(kept, S @ W[:, j].mT, x_out[:, j])
        S = kept + own[:, j]
    return states, S


def forward_of(S, q, k, v, w, e, log_h, log_f, log_z):
    """A segment: q, k, v, gates (BH, n, C, .), the state S (BH, V, K) before it  ->  o (BH, n, C, V), the
    state after it, and what else the backward needs, in the letters above"""
    h = f = z = NO_DECAY
    if log_h is not None:
        h = pairs(log_h)
    if log_f is not None:
        f = factors(log_f)
    if log_z is not None:
        z = factors(log_z)
    h_ts, h_in, h_out, h_all = h
    f_up, f_down, f_in, f_out = f
    z_up, z_down, z_in, z_out = z
    y = times(q, f_up)
    x = times(k, f_down)
    A = times((y @ x.mT).tril_(), h_ts)
    U = times(v, w, z_down)
    M = W = None
    if e is not None:
        r = times(k, e, f_up)
        M = inverted(times(r @ x.mT, h_ts))
        U = M @ U                                       # still without what the keys find in S
        W = -(M @ times(r, f_in, h_in))
    x_out = times(x, f_out, h_out)
    own = times(U, z_out).mT @ x_out
    states, S = walk(S, own, times(f_in, f_out, h_all), times(z_in, z_out), W, x_out)
    if e is not None:
        U += times(W @ states.mT, z_in)
    S_in = times(states, f_in)
    o = times(A @ U + times(y @ S_in.mT, z_in, h_in), z_up)
    return o, S, h + f + z + (A, M, W, U, states, S, None if log_z is None else o)


def backward_of(do, dS, inside, q, k, v, w, e, log_h, log_f, log_z):
    """do (BH, n, C, V), dS (BH, V, K) of the state after the segment  ->  gradients of all that
    forward_of takes"""
    h_ts, h_in, h_out, h_all, *more = inside
    f_up, f_down, f_in, f_out, z_up, z_down, z_in, z_out, A, M, W, U, states, S, o = more
    y = times(q, f_up)
    x = times(k, f_down)
    S_in = times(states, f_in)
    x_out = times(x, f_out, h_out)
    g = times(do, z_up)
    g_in = times(g, z_in, h_in)
    dA = times((g @ U.mT).tril_(), h_ts)
    dU = A.mT @ g
    read = times(g_in.mT @ y, f_in)                     # the chunk's own part of dS
    if e is not None:
        read += times(dU, z_in).mT @ W
    after, dS = walk(dS, read, times(f_in, f_out, h_all), times(z_in, z_out), W, x_out, back=True)
    dU += times(x_out @ after.mT, z_out)
    dq = times(dA @ x + g_in @ S_in, f_up)
    dx = dA.mT @ y + times(times(U, z_out) @ after, f_out, h_out)
    dY = dU
    de = dw = dlog_h = dlog_f = dlog_z = looked = None
    if e is not None:
        dY = M.mT @ dU
        dL = times((dY @ U.mT).tril_(-1).neg_(), h_ts)
        dr = dL @ x - times(dY, z_in, h_in) @ S_in
        dx += dL.mT @ times(k, e, f_up)
        looked = times(dr, f_up)
        de = of_gate(k * looked, e)
        looked = looked * e                             # gradient of k where it looks up
    written = times(dx, f_down)                         # gradient of k where it is written
    dk = written
    balance = written                                   # writes minus reads
    if e is not None:
        dk = written + looked
        balance = written - looked
    dv = times(dY, z_down)
    if w is not None:
        dw = of_gate(dv * v, w)
        dv = dv * w
    if h_in is not None or f_up is not None or z_up is not None:
        kept = after                                    # becomes dS' * S'
        kept[:, :-1] *= states[:, 1:]
        kept[:, -1] *= S
    if h_in is not None:
        dlog_h = of_decay(q * dq - k * balance, kept.sum(2)[:, :, None], h_in)
    if f_up is not None:
        dlog_f = of_decay(q * dq - k * balance, kept.sum(2)[:, :, None], f_up)
    if z_up is not None:
        dlog_z = of_decay(o * do - v * dv, kept.sum(3)[:, :, None], z_up)
    return dq, dk, dv, dw, de, dlog_h, dlog_f, dlog_z, dS


def of_gate(dx, gate):
    """The gradient of a gate, from dx (BH, n, C, d) per channel. The sum if all channels share it."""
    if gate.shape[-1] == 1:
        dx = dx.sum(-1, keepdim=True)
    return dx


def of_decay(reads, kept, gate):
    """The gradient of log-decays, from reads (BH, n, C, d) per step and kept (BH, n, 1, d) per chunk."""
    return of_gate(reads, gate).flip(2).cumsum(2).flip(2) + of_gate(kept, gate)


def cut(x, segment, C):
    """The segment (a slice of steps) of x (B, H, T, d), as chunks (BH, n, C, d). The last is filled with
    zeros, which write and erase nothing. None stays None."""
    if x is None:
        return None
    x = x[:, :, segment]
    rest = -x.shape[2] % C
    if rest:
        x = F.pad(x, (0, 0, 0, rest))
    return x.contiguous().flatten(0, 1).unflatten(1, (-1, C))


def put(chunks, x, segment, like):
    """The inverse of `cut`: write chunks into the segment of x. At first x is None and is made like `like`.
    If there is only one segment, and no padding, the chunks themselves become x."""
    if chunks is None:
        return None
    part = chunks.flatten(1, 2).unflatten(0, like.shape[:2])
    if part.shape == like.shape:
        return part
    if x is None:
        x = torch.empty_like(like)
    x[:, :, segment] = part[:, :, :like[:, :, segment].shape[2]]
    return x


class Chunks(torch.autograd.Function):
    """C: steps per chunk   S (BH, V, K)   q, k, v, w, e, log_h, log_f, log_z as in `on_cpu`  ->  o, S
    If values decay, the backward reads o, so it must not be changed in place."""
    @staticmethod
    def forward(ctx, C, S, *steps):
        v = steps[2]
        T = v.shape[2]
        BH, V, K = S.shape
        length = T                                      # elsewhere, few operations matter more than caches
        if v.device.type == 'cpu':
            length = 2 ** max(6, (NUMBERS // (BH * max(K, V))).bit_length() - 1)        # at least 64
        ctx.segments = [slice(i, i + length) for i in range(0, T, length)]
        if len(ctx.segments) == 1:
            steps = [if_given(torch.Tensor.contiguous, x) for x in steps]               # nothing is cut
        insides = collections.deque(maxlen=KEPT_SEGMENTS if any(ctx.needs_input_grad) else 0)
        ctx.C = C
        o = None
        S = S.clone()                                   # a tensor of inference mode cannot be saved
        begins = []                                     # the state before each segment
        for segment in ctx.segments:
            begins.append(S)
            of_segment = [cut(x, segment, C) for x in steps]
            o_segment, S, inside = forward_of(S, *of_segment)
            o = put(o_segment, o, segment, v)
            insides.append(inside)
        ctx.save_for_backward(*itertools.chain(steps, begins, *insides))
        return o, S.view_as(S)                          # else a cycle: S holds ctx, ctx holds S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        saved = ctx.saved_tensors                       # once: checkpointing allows no second look
        n = len(ctx.segments)
        steps = saved[:8]
        begins = saved[8:8 + n]
        insides = [saved[i:i + INSIDE] for i in range(8 + n, len(saved), INSIDE)]
        gradients = [None] * 8
        for segment, S in zip(reversed(ctx.segments), reversed(begins)):
            of_segment = [cut(x, segment, ctx.C) for x in steps]
            if insides:
                inside = insides.pop()
            else:
                _, _, inside = forward_of(S, *of_segment)
            *parts, dS = backward_of(cut(do, segment, ctx.C), dS, inside, *of_segment)
            gradients = [put(part, dx, segment, x) for part, dx, x in zip(parts, gradients, steps)]
        return None, dS, *gradients


def as_form(f):
    """Turn f(q, k, v, w, e, log_f, log_z, S) -> o, S, whose arguments come from `start`, into a form: a
    function with the arguments of fastweight.recurrent."""
    @full_precision
    @functools.wraps(f)
    def whole(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR):
        o, S = f(*start(q, k, v, write, erase, log_f, log_z, S, normalise))
        return finish(o, normalise, floor, v.dtype), S
    return whole


@as_form
def on_cpu(q, k, v, w, e, log_f, log_z, S):
    """fastweight.chunked through `Chunks`, also on a GPU where no kernel may run. A chunk has CHUNK steps.
    With many features it has twice as many, because a state costs K V numbers per chunk. With few features
    and a rule that erases it has half as many, because the inverse costs C numbers per step. If channels
    decay, it has at most CHUNK, and a channel's log-decay counts as at least LOG_MIN."""
    log_h, log_f, log_z = head_and_channels(log_f, log_z)
    C = CHUNK
    if k.shape[-1] <= 16 and e is not None:
        C = CHUNK // 2
    elif k.shape[-1] >= 64 and log_f is None and log_z is None:
        C = 2 * CHUNK
    o, S_T = Chunks.apply(min(C, q.shape[2]), S.flatten(0, 1), q, k, v, w, e, log_h, log_f, log_z)
    return o, S_T.view(S.shape)


@as_form
def step_over(q, k, v, w, e, log_f, log_z, S):
    """fastweight.recurrent for a single step without gradients. Absent gates cost nothing. The S that is
    given is not changed, but one that has decayed is new, so the later lines may write to it."""
    B, H, V, K = S.shape
    S = S.flatten(0, 1)                                 # (BH, V, K), and rows (BH, 1, .)
    BH = len(S)

    def row(x):
        return x.reshape(BH, 1, -1)
    k = row(k)
    u = row(v)
    new = None
    if log_f is not None:
        S = new = S * row(log_f).exp()
    if log_z is not None:
        new = torch.mul(S, row(log_z).mT.exp(), out=new)
        S = new
    if w is not None:
        u = row(w) * u
    if e is not None:
        u = torch.baddbmm(u, row(e) * k, S.mT, alpha=-1)                        # u - S (e k)
    S = torch.addcmul(S, u.mT, k, out=new)
    o = torch.bmm(row(q), S.mT)
    return o.view(B, H, 1, V), S.view(B, H, V, K)
