"""The folder of a run: log.jsonl, which locks it, and the checkpoint that --resume goes on from.

    log, run = begun(args, 0, model, data, size)        # ValueError if another run is at work there
    tell(log, 'what is printed', loss=1.5)      # and a line of log.jsonl
    keep(args, model, opt, run, states)         # ckpt.safetensors; `restore` is the inverse
"""
import contextlib
import dataclasses
import glob
import json
import os
import shlex
import shutil

import torch

from common import files
from common.flags import plural
from common.machine import commit
from common.weights import pack, unpack
from data.kinds import TRAVELS
from data.prepare import SIDES
from model import save


def say(text):
    print(text, flush=True)


def tell(log, text='', **figures):
    """Print a text, if there is one, and write its figures as one line of log.jsonl."""
    if text:
        say(text)
    print(json.dumps(figures), file=log, flush=True)


def tell_step(log, data, steps, lr, step, loss, norm, ms, **stage):
    """Print and log a step: its learning rate, its loss (1,), its gradient's norm, and its time in ms. steps:
    of the whole run; stage=: that of a conversion, begins the line"""
    loss = loss.item()
    norm = norm.item()
    tok_s = 1e3 * data.T * data.batch_size * data.accum / ms
    cost = f'loss {loss:.3f}' if stage else data.cost(loss)
    begins = ''.join(f'{name} | ' for name in stage.values())
    text = (f'{begins}step {step:5d}/{steps} | {cost} | lr {lr:.1e} | norm {norm:5.2f} | '
            f'{ms:5.0f} ms | {tok_s:,.0f} tok/s | eta {(steps - step) * ms / 6e4:.1f} min')
    tell(log, text, step=step, loss=loss, lr=lr, norm=norm, ms=ms, tok_s=tok_s, **stage)


def log_of(args, first=True):
    """Make the run's folder and open its log, which locks it; remove what a killed save left there.
    ValueError if another run is at work there. first: whether this is the first process; others write
    nothing"""
    if not first:
        return open(os.devnull, 'w')
    os.makedirs(args.out, exist_ok=True)
    log = open(f'{args.out}/log.jsonl', 'a')                # noqa: SIM115
    with contextlib.suppress(ImportError, OSError):         # Windows; a file system without locks
        import fcntl
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f'--out={args.out}: another run is at work there; take another folder') from None
        for name in 'ckpt', 'best', 'stage-*':
            for part in glob.glob(f'{glob.escape(args.out)}/{name}.safetensors.*.part'):
                shutil.rmtree(part)
    if not args.resume:
        log.truncate(0)
    return log


def cut_log(log, step, stage=None):
    """Drop from log.jsonl what was told of steps behind `step` in a stage: a run that was killed goes on from
    there. A line that was only begun goes, too."""
    kept = []
    for line in files.read_file(log.name).splitlines():
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if told.get('step', 0) <= step or told.get('stage') != stage:
                kept.append(line.decode() + '\n')
    log.truncate(0)
    log.writelines(kept)
    log.flush()


def begun(args, step, model, data, size):
    """Begin or go on with the log of a run, and print what is trained -> the log, and what its checkpoints
    say of the run. step: steps done before; size: about how many bytes a step takes"""
    log = log_of(args, data.rank == 0 and args.steps > 0)
    if args.resume and data.rank == 0:
        cut_log(log, step)
    config = model.config
    run = {'args': dataclasses.asdict(args), 'torch': torch.__version__, 'threads': torch.get_num_threads()}
    count = sum(p.numel() for p in model.parameters())
    about = {key: value for key, value in data.meta.as_dict().items() if key not in ('json', *TRAVELS)}
    train, val = (len(side) // data.meta.step for side in (data.train, data.val))
    text = (f'{config.summary()} | {count / 1e6:.2f} M parameters | '
            f'{args.data}: {train:,} + {val:,} {data.unit}, a vocabulary of {config.vocab_size} | '
            f'{data.world} x {data.device}, {str(data.dtype)[6:]}, {plural(run["threads"], "thread")}')
    if args.steps:
        text += (f'\n{plural(args.batch_size * args.accum, "row")} of {data.T} a step, about '
                 f'{size / 1e9:.2g} GB besides torch; lr {args.lr:.2g}; saved every '
                 f'{plural(args.eval_every, "step")}; recurrence: {model.why}')
        if not args.resume and os.path.exists(f'{args.out}/ckpt.safetensors'):
            text += f'\nthe run in {args.out} is replaced'
    tell(log, text, config=dataclasses.asdict(config), **run, data=about, commit=commit(),
         device=str(data.device), params=count)
    return log, run


# ---- checkpoints -------------------------------------------------------------------------------------------
def keep(args, model, opt, run, states, alone=True):
    """Write all that --resume needs. run: what the file says of it; states: those of --carry, which only a
    run of one process, alone, keeps"""
    extra = pack_optimiser(model, opt)
    for i, state in enumerate(states if alone else ()):
        extra.update(pack(state, f'carry{i}'))
    save(f'{args.out}/ckpt.safetensors', model, run, extra)


def restore(args, header, data, model, opt):
    """Restore the optimiser of a stopped run -> the states of --carry, one per batch."""
    tensors = header.pop('tensors')                         # as large as three models
    for side in SIDES:
        if getattr(header['data'], side) != getattr(data.meta, side):
            raise ValueError(f'--resume --data={args.data}: {side}.bin is not what the run began with; bring '
                             f'it back, or begin anew with --init={args.out}/ckpt.safetensors')
    unpack_optimiser(model, opt, tensors)
    if 'carry0.t' not in tensors:
        return [None] * args.accum
    return [unpack(tensors, data.device, f'carry{i}') for i in range(args.accum)]


def pack_optimiser(model, opt):
    """What the optimiser remembers of each parameter, as a flat dict of tensors, for `save`."""
    flat = {}
    for name, p in model.named_parameters():
        flat.update({f'opt.{name}.{key}': x for key, x in opt.state.get(p, {}).items()})
    return flat


def unpack_optimiser(model, opt, tensors):
    """The inverse of `pack_optimiser`. A parameter that has never had a step has no memory."""
    for name, p in model.named_parameters():
        own = f'opt.{name}.'
        memory = {key.removeprefix(own): x for key, x in tensors.items() if key.startswith(own)}
        for key, x in memory.items():
            opt.state[p][key] = x.to(p.device)


def next_command(out, meta):
    """The command that runs the model in the folder `out`. meta: of its data"""
    command = f'python sample.py --init={shlex.quote(out)}/ckpt.safetensors'
    if meta.source:
        command += ' --source="..."'
    if meta.classes:
        command += ' --prompt="..."'
    if meta.template:
        command += ' --chat'
    return command
