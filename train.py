"""Train a fast-weight model, from nothing or from where it stopped.

    python train.py --rule=delta                   five minutes on two CPU cores, nothing to download
    python train.py --data=recall --rule=sum --steps=1000     recall: sum fails, --rule=delta solves it
    python train.py --resume --steps=8000          goes on from out/ckpt.safetensors, bit for bit on a CPU
    torchrun --nproc_per_node=2 train.py --rule=delta         the same training in two processes

Writes out/ckpt.safetensors (weights, optimiser, step), out/best.safetensors (weights) and out/log.jsonl.
"""
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import prepare
from model import (GPT, Config, flag, load, pack, pack_optimiser, parse, pick_device, pick_form, read, save,
                   script, unpack, unpack_optimiser)

BAD_STEPS = 10     # so many non-finite steps in a row end the run
WARMUP = 0.05      # of all steps; then a cosine to 0
PART = 65536       # tokens of the validation file that are looked at on the way


@dataclass
class Args:
    data: str = flag('stdlib', f'{", ".join(prepare.DATASETS)}, or any text file')
    out: str = flag('out', 'folder for checkpoints and the log')
    resume: bool = flag(False, 'go on from the checkpoint in --out')
    init: str = flag('', 'start with the weights of this checkpoint; model flags change what may change')
    steps: int = flag(6400, 'optimiser steps', low=1)
    batch_size: int = flag(4, 'rows a step, over all processes', low=1)
    accum: int = flag(1, 'batches a step, for more rows than fit into memory', low=1)
    lr: float = flag(4e-3, 'peak learning rate', low=0)
    weight_decay: float = flag(0.1, 'on matrices only', low=0)
    clip: float = flag(1.0, 'largest norm of the gradient', low=0)
    carry: bool = flag(False, 'rows follow each other in the text and S is handed on (Schlag 2021, table 4)')
    eval_every: int = flag(500, 'steps between evaluations, which also save', low=1)
    log_every: int = flag(50, 'steps between lines', low=1)
    val_tokens: int = flag(0, 'how much of the validation data the closing figures are over; 0: all', low=0)
    seed: int = flag(0, 'of weights, data order and dropout', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda, cuda:1, mps')
    dtype: str = flag('auto', 'of the matrix products; S is always fp32', ['auto', 'float32', 'bfloat16'])
    impl: str = flag('auto', 'form of the recurrence', ['auto', 'loop', 'chunk', 'fused'])
    compile: bool = flag(False, 'torch.compile, where it works')


# ---- machine -----------------------------------------------------------------------------------------------

def machine(args):
    """-> rank, world, device, dtype. Processes are those of torchrun; none is one."""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    local = os.environ.get('LOCAL_RANK', 0)
    device = pick_device(args.device)
    if device.type == 'cuda' and world > 1:
        device = torch.device(f'cuda:{local}')
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
    fast_bf16 = device.type == 'cuda' and torch.cuda.get_device_capability(device)[0] >= 8
    auto = torch.bfloat16 if fast_bf16 else torch.float32
    return rank, world, device, auto if args.dtype == 'auto' else getattr(torch, args.dtype)


def memory(device):
    """Peak bytes: of the GPU, or of the process."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == 'win32':
        return 0
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


# ---- data: row i of step s depends on (seed, s, i) alone: resuming and more processes change nothing -------

def starts(args, n, step, T, meta):
    """Where the rows of this step begin, (accum * batch_size,), all of them, whatever the process."""
    rows = args.accum * args.batch_size
    if args.carry:                                          # one track a row, read on and on
        return (np.arange(rows) * (n // rows) + step * T) % (n - T)
    rng = np.random.Generator(np.random.Philox(key=args.seed, counter=[0, 0, 0, step]))
    if 'row' in meta:
        return rng.integers(n // (2 * T), size=rows) * 2 * T
    return rng.integers(n - T, size=rows)


def rows(data, begin, T, meta, device):
    """-> x, y (B, T): inputs, and the token that should follow each; -1 where it does not count."""
    shift = T if 'row' in meta else 1                       # generated rows carry their targets behind them
    stack = lambda s: torch.from_numpy(np.stack([data[i + s:i + s + T] for i in begin]).astype(np.int64))
    x, y = stack(0), stack(shift)
    return x.to(device), y.masked_fill(y == meta.get('ignore', -1), -1).to(device)


def said(model, x, y, state, meta):
    """Logits (N, vocab) and targets (N,) where these count, and the state."""
    at = y >= 0 if 'row' in meta else None                  # in a text, all count
    logits, state = model(x, state, at)
    return logits.flatten(0, -2).float(), y.flatten() if at is None else y[at], state


def nats(logits, y):
    """Sum of -log p over the targets, and how many and how many of them are right."""
    loss = F.cross_entropy(logits, y, reduction='sum')
    right = (logits.argmax(-1) == y).sum()
    return torch.stack([loss.cpu().double(), torch.tensor(len(y)), right.cpu()])     # MPS has no float64


@torch.no_grad()
def evaluate(model, data, T, meta, device, cast, rank=0, world=1, limit=None):
    """The rule `blocks`: rows of T, every token but the first counted once. -> nats a token, share right"""
    model.eval()
    stride = 2 * T if 'row' in meta else T
    end = min(len(data), limit or len(data)) - (0 if 'row' in meta else 1)
    begin = np.arange(0, end - stride + 1, stride)
    total = torch.zeros(3, dtype=torch.float64)
    for i in range(rank * 32, len(begin), world * 32):
        x, y = rows(data, begin[i:i + 32], T, meta, device)
        with cast:
            total += nats(*said(model, x, y, None, meta)[:2])
    rest = data[int(begin[-1]) + T:] if 'row' not in meta and not limit else ()
    if len(rest) > 1 and rank == 0:                         # the last, shorter row
        x, y = rows(rest, [0], len(rest) - 1, meta, device)
        with cast:
            total += nats(*said(model, x, y, None, meta)[:2])
    if world > 1:
        total = total.to(device)
        dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item(), (total[2] / total[1]).item()


@torch.no_grad()
def evaluate_carried(model, data, meta, device, cast, segment=4096):
    """The rule `carried`: the state runs along the whole file."""
    model.eval()
    total, state = torch.zeros(3, dtype=torch.float64), None
    for i in range(0, len(data) - 1, segment):
        T = min(segment, len(data) - 1 - i)
        x, y = rows(data, [i], T, meta, device)
        with cast:
            *answer, state = said(model, x, y, state, meta)
        total += nats(*answer)
    model.train()
    return (total[0] / total[1]).item()


# ---- when things go wrong ----------------------------------------------------------------------------------

def culprit(model, x):
    """The first module, in order of computation, whose output is not finite; else the first parameter."""
    found, hooks = [], []
    for name, module in model.named_modules():
        def look(module, args, out, name=name):
            out = out[0] if isinstance(out, tuple) else out
            if not found and torch.is_tensor(out) and not out.isfinite().all():
                found.append(name)
        hooks.append(module.register_forward_hook(look))
    with torch.no_grad():
        model(x)
    for h in hooks:
        h.remove()
    bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return f'output of {found[0]}' if found else f'gradient of {bad[-1]}' if bad else 'the loss'


# ---- the run -----------------------------------------------------------------------------------------------

def settings(argv):
    """Flags, and with --resume the checkpoint's. -> args, config, checkpoint's tensors, its metadata"""
    given, given_model = parse(argv, __doc__, Args, Config)
    args = Args(**given)
    if args.init and args.resume:
        raise ValueError('--init starts a run, --resume goes on with one: give one of them')
    if not args.resume:
        if not args.init:
            return args, Config(**given_model), {}, {}
        model, meta = load(args.init, **given_model)
        weights = {f'model.{k}': v for k, v in model.state_dict().items()}
        return args, model.config, weights, {'data': meta.get('data', {})}
    path = os.path.join(args.out, 'ckpt.safetensors')
    tensors, meta = read(path)                       # the run's own flags, except for those given again
    if 'best' not in meta:
        raise ValueError(f'{path}: holds no training run, only a model')
    args, config = Args(**{**meta['args'], **given}), Config(**meta['config'])
    for name, value in given_model.items():
        if getattr(config, name) != value:
            raise ValueError(f'--{name}={value}: {path} was made with {getattr(config, name)!r}; '
                             'drop the flag, or start anew with another --out')
    if args.steps <= meta['step']:
        raise ValueError(f'--steps={args.steps}: {path} is at step {meta["step"]} already; give more steps')
    return args, config, tensors, meta


def check(args, config, model, train, val, data, meta, world):
    """What flags, data and checkpoint must agree on."""
    T, saved = config.block_size, meta.get('data', data)
    if args.batch_size % world:
        raise ValueError(f'--batch_size={args.batch_size} does not divide among {world} processes')
    if min(len(train), len(val)) <= T + 1:
        raise ValueError(f'--data={args.data}: {len(train)} training and {len(val)} validation tokens, but a '
                         f'row takes {T + 1}; give a longer text or a smaller --block_size')
    if not prepare.same_tokens(saved, data):
        raise ValueError(f'--data={args.data}: its tokens are not those of the checkpoint, {saved["name"]}')
    if not args.carry:
        return
    if 'row' in data:
        raise ValueError(f'--carry: the rows of {args.data} have nothing to do with each other')
    if model.max_len:
        raise ValueError('--carry: learned positions and cosformer end after a row; take other --pos, --phi')
    if any(hasattr(m, 'redraw') for m in model.modules()):
        raise ValueError('--carry: random features are redrawn for every batch, and a state in the old ones '
                         'means nothing; take another --phi')
    if meta and world > 1:
        raise ValueError('--resume --carry: the file has the states of one process; resume without torchrun')


def average(model, loss, world):
    """Mean of gradients and loss over the processes; every one has the same number of rows."""
    if world == 1:
        return loss
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads] + [loss])
    dist.all_reduce(flat)
    *parts, loss = (flat / world).split([g.numel() for g in grads] + [1])
    for g, part in zip(grads, parts):
        g.copy_(part.view_as(g))
    return loss


@script
def main(argv):
    args, config, tensors, meta = settings(argv)
    rank, world, device, dtype = machine(args)
    say = print if rank == 0 else lambda *a, **k: None
    train, val, data = prepare.load(args.data)
    val = val[:args.val_tokens or None]
    T = data.get('row', config.block_size)
    config = dataclasses.replace(config, vocab_size=data['vocab_size'], block_size=T)
    torch.manual_seed(args.seed)
    model = GPT(config).to(device)
    check(args, config, model, train, val, data, meta, world)
    model.form, why = pick_form(args.impl)

    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]     # gains, and the biases of gates (H, 1, K)
    opt = torch.optim.AdamW([{'params': matrices, 'weight_decay': args.weight_decay},
                             {'params': others, 'weight_decay': 0.0}],
                            lr=args.lr, betas=(0.9, 0.99), fused=device.type in ('cpu', 'cuda'))
    done, best = meta.get('step', 0), meta.get('best', math.inf)
    states = [None] * args.accum                     # --carry: one for each batch of a step
    if tensors:
        weights = {k.removeprefix('model.'): v for k, v in tensors.items() if k.startswith('model.')}
        model.load_state_dict(weights)
    if args.resume:
        unpack_optimiser(model, opt, tensors)
        states = [unpack(tensors, f'carry{i}', device) for i in range(args.accum)]

    cast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    score = scorer(data)
    n_params = sum(p.numel() for p in model.parameters())
    say(f'{",".join(config.rules())} | {n_params / 1e6:.2f} M parameters | {args.data}: {len(train):,} + '
        f'{len(val):,} tokens of {data["vocab_size"]} | {world} x {device}, {str(dtype)[6:]}, '
        f'{torch.get_num_threads()} threads\nrecurrence: {why}')
    os.makedirs(args.out, exist_ok=True)
    log = open(os.path.join(args.out, 'log.jsonl') if rank == 0 else os.devnull, 'a' if args.resume else 'w')
    write_log = lambda **row: print(json.dumps(row), file=log, flush=True)
    keep = {'args': dataclasses.asdict(args), 'data': data, 'torch': torch.__version__}
    write_log(config=dataclasses.asdict(config), **keep, commit=commit(), device=str(device), params=n_params)
    compiled = torch.compile(model) if args.compile else model

    first, shown, bad, seconds, since = done, done, 0, 0.0, time.perf_counter()
    while done < args.steps:
        warm = (done + 1) / max(1, WARMUP * args.steps)
        lr = args.lr * min(warm, 0.5 + 0.5 * math.cos(math.pi * done / args.steps))
        for group in opt.param_groups:
            group['lr'] = lr
        seed = np.random.SeedSequence((args.seed, done, rank)).generate_state(1)[0]
        torch.manual_seed(int(seed))                 # dropout is a function of the step, too
        begin, new = starts(args, len(train), done, T, data), list(states)
        loss = torch.zeros(1, device=device)
        for i in range(args.accum):
            mine = begin[i * args.batch_size:(i + 1) * args.batch_size][rank::world]
            x, y = rows(train, mine, T, data, device)
            with cast:
                logits, y, state = said(compiled, x, y, states[i], data)
                part = F.cross_entropy(logits, y)
            (part / args.accum).backward()
            loss += part.detach() / args.accum
            if args.carry:                           # truncated backpropagation: S goes on, its gradient ends
                new[i] = unpack({k: v.detach() for k, v in pack(state).items()})
        loss = average(model, loss, world)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        done += 1
        if norm.isfinite() and loss.isfinite():
            opt.step()
            states, bad = new, 0
        else:                                        # leave out this step; keep the last good checkpoint
            bad, where = bad + 1, culprit(model, x)
            say(f'step {done}: not finite ({where} first), skipped, {bad} in a row')
            if bad == BAD_STEPS:
                raise ValueError(f'{bad} steps in a row were not finite, {where} first; stopped before '
                                 f'saving. Try a smaller --lr than {args.lr:g}, or another --norm')
        opt.zero_grad(set_to_none=True)

        if done % args.log_every == 0 or done in (first + 1, args.steps):
            now = time.perf_counter()
            ms, seconds = 1e3 * (now - since) / (done - shown), seconds + now - since
            tok_s, eta = 1e3 * T * args.batch_size * args.accum / ms, (args.steps - done) * ms / 6e4
            peak, loss, norm = memory(device), loss.item(), norm.item()
            say(f'step {done:5d}/{args.steps} | loss {loss:.3f} | lr {lr:.1e} | norm {norm:5.2f} | '
                f'{ms:5.0f} ms | {tok_s / 1e3:6.1f}k tok/s | {peak / 2**20:.0f} MB | eta {eta:.1f} min',
                flush=True)
            write_log(step=done, loss=loss, lr=lr, norm=norm, ms=ms, tok_s=tok_s, memory=peak)
            since, shown = time.perf_counter(), done
        if done % args.eval_every == 0 or done == args.steps:
            seconds += time.perf_counter() - since
            for b in model.buffers() if world > 1 else ():     # random features: everybody's are rank 0's
                dist.broadcast(b, 0)
            val_loss, right = evaluate(model, val, T, data, device, cast, rank, world, PART)
            say(f'step {done:5d} | start of validation: {score(val_loss, right)}', flush=True)
            write_log(step=done, val_loss=val_loss, accuracy=right)
            if rank == 0:
                if val_loss < best:
                    best = val_loss
                    save(os.path.join(args.out, 'best.safetensors'), model, {**keep, 'step': done})
                extra = pack_optimiser(model, opt)
                for i, s in enumerate(states):
                    extra.update(pack(s or [], f'carry{i}'))
                about = {**keep, 'step': done, 'best': best}
                save(os.path.join(args.out, 'ckpt.safetensors'), model, about, extra)
            since, shown = time.perf_counter(), done
    say(f'\n{done - first} steps in {seconds / 60:.1f} minutes')
    report(args, model, val, data, device, cast, rank, world, say, write_log)
    if world > 1:
        dist.barrier()                               # nobody leaves while rank 0 still reports
        dist.destroy_process_group()


def commit():
    """Of the code that runs, where git can tell."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        git = subprocess.run(['git', '-C', here, 'rev-parse', 'HEAD'], capture_output=True, text=True)
        return git.stdout.strip()
    except OSError:
        return ''


def scorer(data):
    """(nats a token, share that is right) -> what to print of them."""
    if 'row' in data:
        return lambda loss, right: f'accuracy {100 * right:.1f} %'
    bits = data['val']['tokens'] / data['val']['bytes'] / math.log(2)
    ppl = lambda loss: math.exp(min(loss, 50))
    return lambda loss, _: f'{loss * bits:.4f} bits per byte, perplexity {ppl(loss):.3f} a token'


def report(args, model, val, data, device, cast, rank, world, say, write_log):
    """The closing lines: the whole validation file by both rules, a sample, the next command."""
    score = scorer(data)
    loss, right = evaluate(model, val, model.config.block_size, data, device, cast, rank, world)
    say(f'validation, blocks of {model.config.block_size}: {score(loss, right)}', flush=True)
    write_log(rule='blocks', val_loss=loss, accuracy=right)
    if 'row' in data or rank:
        return
    if model.max_len is None and model.config.keeps() == {None}:
        loss = evaluate_carried(model, val, data, device, cast)
        say(f'validation, carried: {score(loss, 0)}', flush=True)
        write_log(rule='carried', val_loss=loss)
    model.eval()
    prompt, draw = torch.tensor([prepare.first(data)], device=device), torch.Generator(device).manual_seed(0)
    with cast:
        texts = model.generate(prompt, temperature=0.7, generator=draw)
        tokens = [t.item() for t, _ in itertools.islice(texts, min(400, (model.max_len or 401) - 1))]
    say(f'--- a sample ---\n{prepare.decode(tokens, data)}\n---')
    say(f'next: python sample.py --init={args.out}/ckpt.safetensors --tokens=1000')


if __name__ == '__main__':
    sys.exit(main())
