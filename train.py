"""Train a fast-weight model from scratch, fine-tune a pretrained one, or resume a run.

    python train.py --rule=delta                   5 to 10 minutes on two CPU cores, no download
    python train.py --data=recall --rule=sum --steps=1000     sum fails at recall; --rule=delta solves it
    python train.py --resume --steps=8000          resumes out/ckpt.safetensors, bit for bit on a CPU
    python train.py --init=FOLDER --data=my.txt --steps=50 --out=out/tuned     fine-tune a pretrained model
    python train.py --init=bert-base-uncased --data=cola --lr=5e-5             with a new head, for classes
    python train.py --init=FOLDER --data=my.txt --steps=0 --rule=h2o           only evaluate, with a cache
    torchrun --nproc_per_node=2 train.py --rule=delta         the same steps by two processes

Each evaluation writes out/ckpt.safetensors (weights, optimiser, step) and, if the validation loss is the
lowest so far, out/best.safetensors. Ctrl-C ends and saves the step that it meets, unless there are several
processes. out/log.jsonl has the losses, out/result.json the final figures. All random numbers depend only on
the seed, the step and the process. So a resumed run ends in the same bits if the number of threads stays the
same (--threads=N pins it). Several processes, or batches (--accum), compute parts of one larger batch; only
dropout and redrawn features differ. If you resume with more --steps, the cosine is stretched over them.
"""
import dataclasses
import math
import statistics
import sys
import time
from dataclasses import dataclass

from common.errors import Stop, script      # before torch: common/__init__.py
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import models
from common import files, machine
from common.flags import flag, parse, plural
from common.terminal import progress
from common.weights import map_state
from data import prepare, rows
from model import Config, save
from runs import log, processes, starts
from runs.log import say, tell

WARMUP = 0.05       # share of the steps; after the warm-up, a cosine to 0
SLOW = 20           # seconds: at least one line is printed in so many
LR = 4e-3           # of our own models
SAMPLE = 400        # tokens in the sample at the end
GLIMPSE = 80        # and in that after an evaluation
OFTEN = 'data rule phi init steps batch_size lr n_layer n_head n_embd block_size out resume'  # in --help


@dataclass
class Args(rows.Flags, machine.Flags):
    data: str = flag('stdlib', f'{", ".join(prepare.DATASETS)}, any text file, labelled lines (mine.tsv), '
                               'conversations (mine.jsonl), sentences and translations (a.en:a.de); '
                               'default with --init: that of the checkpoint', path=True)
    out: str = flag('out', 'folder for checkpoints and the log', path=True)
    resume: bool = flag(False, 'continue the run whose checkpoint is in --out, from its last save on')
    init: str = flag('', 'start from the weights of a checkpoint or hub model; flags may adapt it', path=True)
    published: bool = flag(False, 'a new model with the convolutions, gates and norms of its rule\'s paper '
                                  '(delta, gated_delta, kda, gla, mamba2, retention)', later=True)
    steps: int = flag(6400, 'optimiser steps; 0: only evaluate, and save nothing', low=0, high=10 ** 9)
    batch_size: int = flag(4, 'rows per batch, over all processes; default of a large model: one for each',
                           low=1, high=2 ** 20)
    accum: int = flag(1, 'batches per step, for more rows than fit into memory', low=1, high=2 ** 12)
    lr: float = flag(LR, 'peak learning rate; default of a model from the hub: '
                         f'{starts.PRETRAINED_LR:g} / width', low=0, high=100)
    weight_decay: float = flag(0.1, 'applies to parameters with two axes', low=0, high=100)
    clip: float = flag(1.0, 'gradient clipping: largest norm; 0: no clipping', low=0, high=1e9)
    eval_every: int = flag(500, 'steps between evaluations; each one also saves', low=1, high=10 ** 9)
    log_every: int = flag(50, 'steps between printed lines; at least one every 20 seconds', low=1,
                          high=10 ** 9)
    seed: int = flag(0, 'seed of the weights, the data order and dropout', low=0, high=2 ** 32 - 1)


# ---- the optimiser -----------------------------------------------------------------------------------------
def adamw(model, lr, weight_decay, new=(), factor=1.0):
    """AdamW over all parameters that require gradients, at `factor` times the rate for those named in `new`.
    Weight decay is for parameters with two axes: not gains, gate biases (H, 1, K), feature maps (H, m, d)."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decay = weight_decay if p.dim() == 2 else 0.0
            scale = factor if name in new else 1.0
            group = {'params': [], 'weight_decay': decay, 'scale': scale}
            groups.setdefault((decay, scale), group)['params'].append(p)
    return torch.optim.AdamW(list(groups.values()), lr=lr, betas=(0.9, 0.99), fused=True)


def lr_at(step, steps, peak):
    """The learning rate of a step (the first is 0): the smaller of a linear warm-up and a cosine to 0."""
    warm = (step + 1) / max(1, WARMUP * steps)
    return peak * min(warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def begin_step(opt, step, lr, seed, rank=0):
    """Set the learning rate of a step (the first is 0) and the seed of its random numbers, dropout included.
    Both depend on nothing else, so a stopped run can be resumed exactly."""
    for group in opt.param_groups:
        group['lr'] = group['scale'] * lr
    drawn = np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]
    torch.manual_seed(int(drawn))


# ---- a step, an evaluation ---------------------------------------------------------------------------------
def losses(model, data, states, step):
    """Yield the loss, cross entropy, of each batch of a step. states: one initial state per batch, each None
    without --carry. With it, each is replaced by its final state.

    The loss of a step is the mean over the targets of all its batches and processes. Rows differ in their
    number of targets, so a mean of the batches' means would be another loss. The processes' losses and
    gradients are averaged later, so each divides by all targets over the number of processes."""
    begin = data.starts(step)
    share = data.targets(begin) / data.world
    for i, state in enumerate(states):
        x, y = data.batch(begin, i)
        logits, targets, end = data.predict(model, x, y, state)
        yield F.cross_entropy(logits, targets, reduction='sum') / share
        if data.carry:                                      # gradients do not flow into earlier steps
            states[i] = map_state(torch.Tensor.detach, end)


def clipped(model, loss, opt, step, clip):
    """Clip the gradient to this norm (0: do not) -> its norm. ValueError if it or the loss is not finite"""
    norm = clip_grad_norm_(model.parameters(), clip or math.inf)
    if not (norm.isfinite() and loss.isfinite()):
        raise ValueError(f'step {step + 1}: loss or gradient is not finite; try a smaller rate than '
                         f'{opt.defaults["lr"]:g}, or another --norm')
    return norm


@torch.no_grad()
def evaluate(model, data, begin=None, carried=False, label=''):
    """-> nats per target, and figures of right answers: `accuracy` (0 to 1) and, of classes, those of
    `agreement`, on the validation rows that start at `begin`; None: all. Each row starts from an empty state,
    and the processes share the rows.
    carried: read row by row, each from the final state of the last. label: begins the progress bar"""
    if begin is None:
        begin = data.blocks()
    at_once = machine.tokens_at_once(data.meta.vocab_size, data.device) // data.T
    many = 1 if carried else max(1, min(32, at_once))       # rows at a time
    processes.share_buffers(model, data.world)
    was_training = model.training
    model.eval()
    state = None
    total = torch.zeros(3, dtype=torch.float64)             # nats, targets, right guesses
    counts = data.no_counts(model)
    for i in progress(range(data.rank * many, len(begin), data.world * many), label):
        x, y = data.rows(data.val, begin[i:i + many])
        logits, y, end = data.predict(model, x, y, state)
        if carried:
            state = end
        loss = F.cross_entropy(logits, y, reduction='sum', ignore_index=-1)
        said = logits.argmax(-1)
        total += torch.tensor([loss.item(), (y >= 0).sum().item(), (said == y).sum().item()])
        data.count(counts, said, y)
    processes.add_up(data.world, total, counts)
    model.train(was_training)
    loss, count, right = total.tolist()
    return loss / count, {'accuracy': right / count, **data.figures(counts)}


def report(args, model, data, out, **figures):
    """Compute the final figures on all validation data, read as `blocks` and, if the model keeps matrices
    alone, a text also `carried`. They are added to `figures`, and all go to result.json as one flat dict."""
    begin = data.blocks()
    loss, right = evaluate(model, data, begin, label='validation')
    processes.leave(data.world)                             # one process does the rest
    if data.rank > 0:
        return
    tell(out, f'validation, blocks of {data.T}: {data.score(loss, right, begin)}', read='blocks',
         val_loss=loss, **right)
    figures.update({'val_loss': loss, **right, 'validation tokens': len(data.val), **data.bits(loss, begin)})
    if data.goes_on(model):
        loss, right = evaluate(model, data.in_order(), carried=True, label='validation, carried')
        tell(out, f'validation, carried: {data.score(loss, right, begin)}', read='carried', val_loss=loss)
        carried = {'val_loss': loss, **data.bits(loss, begin)}
        figures.update({f'{name} carried': figure for name, figure in carried.items()})
    if args.steps:
        files.write_json(f'{args.out}/result.json', {
            **figures, 'commit': machine.commit(), **dataclasses.asdict(args),
            **dataclasses.asdict(model.config)})
        say(f'{data.sample(model.eval(), SAMPLE, args.data)}next: {log.next_command(args.out, data.meta)}')


# ---- the run -----------------------------------------------------------------------------------------------
@script
def main(argv):
    # what is trained, on what: flags, data, model, optimiser
    given, *given_model = parse(argv, __doc__, Args, Config, first=OFTEN, more=models.flags)
    args, cls, config, weights, header = starts.begin(Args(**given), given, models.merged(given_model))
    rank, world, device = processes.join(machine.pick_device(args.device))
    train, val, meta = starts.data_of(args, header.get('data'))
    dtype = machine.pick_dtype(args.dtype, device)
    data = rows.rows_of(train, val, meta, meta.row or args.row, device, args.batch_size, args.seed,
                        args.accum, args.carry, rank, world, dtype)
    torch.manual_seed(args.seed)
    model = starts.built(args, cls, config, data, weights)
    del weights                                             # the model has a copy
    opt = adamw(model, args.lr, args.weight_decay)
    states = [None] * args.accum                            # of --carry, one per batch
    if args.resume:
        states = log.restore(args, header, data, model, opt)
    first = header.get('step', 0)                           # steps done before resuming
    best = header.get('best', math.inf)                     # loss of an evaluation

    starts.take_threads(args, header, model, data)
    out, run = log.begun(args, first, model, data, starts.bytes_of(model, data))
    if args.steps == 0:
        report(args, model, data, out)
        return
    compute = torch.compile(model) if args.compile else model
    some, label = data.judged()                             # validation rows for evaluations on the way
    times = []                                              # seconds of each step since the last line
    seconds = 0.0                                           # of all steps together
    with Stop(world == 1) as stop:
        for step in range(first, args.steps):
            began = time.perf_counter()
            lr = lr_at(step, args.steps, args.lr)
            begin_step(opt, step, lr, args.seed, rank)
            total = torch.zeros(1, device=device)
            for loss in losses(compute, data, states, step):        # forward, a batch at a time
                loss.backward()                                     # the gradients of batches add up
                total += loss.detach()
            processes.average(model, total, world)
            norm = clipped(model, total, opt, step, args.clip)
            opt.step()
            model.zero_grad(set_to_none=True)
            times.append(time.perf_counter() - began)

            # tell, judge, save
            done = step + 1
            evaluates = done % args.eval_every == 0 or done == args.steps
            logs = done % args.log_every == 0 or done in (first + 1, args.steps) or sum(times) > SLOW
            if logs or evaluates:
                ms = 1e3 * statistics.mean(times)
                seconds += sum(times)
                times.clear()
            if logs:
                log.tell_step(out, data, args.steps, lr, done, total, norm, ms)
            if evaluates:
                judged, right = evaluate(model, data, some)
                tell(out, f'step {done:5d} | {label}: {data.score(judged, right, some)}', step=done,
                     val_loss=judged, **right)
                if rank == 0 and done < args.steps:                 # something to read meanwhile
                    print(data.glimpse(model, GLIMPSE, args.data), end='', flush=True)
                improved = judged < best
                best = min(best, judged)
            stops = stop.asked
            if rank == 0 and (evaluates or stops):
                run.update(step=done, data=meta, best=best)
                if evaluates and improved:
                    save(f'{args.out}/best.safetensors', model, run)
                log.keep(args, model, opt, run, states, world == 1)
            if stops:
                break
        stop.if_asked(f'after step {done}, which is saved: --resume with this --out goes on')
    say(f'\n{plural(args.steps - first, "step")} in {seconds / 60:.1f} minutes; now all validation data')
    report(args, model, data, out, steps=args.steps, ms=ms, minutes=seconds / 60)
    if best < judged:
        say(f'{args.out}/best.safetensors, an earlier step, has a lower validation loss')


if __name__ == '__main__':
    sys.exit(main())
