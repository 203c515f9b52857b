"""The short convolution of a block, faster. Its definition is model.shifted_sum.

    y = shifted_sum(x, w)       y_t = sum_s w_{n-s} x_{t-s}       x, y (B, T, D), w (n + 1, D)

Each channel of y is a weighted sum of the same channel of x, at this step and the n steps before it.
"""
import torch


class ShiftedSum(torch.autograd.Function):
    """Each weight multiplies the whole input, shifted: y[s:] += w_{n-s} x[:-s]. The backward shifts the other
    way. It is written by hand because autograd's takes two to three times as long: it makes a tensor of the
    input's size for each slice."""
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
    """As model.shifted_sum: y_t = sum_s w_{n-s} x_{t-s}. x (B, T, D), w (n + 1, D)  ->  y (B, T, D)"""
    return ShiftedSum.apply(x, w)
