"""A stage of a conversion: the steps of its training, and a checkpoint from which --resume goes on.

    run = Conversion(args, teacher, data, about)
    run.train_stage('fine-tune', student, losses, steps=1000, lr=1e-3)

The losses are the caller's. A checkpoint holds only what its stage changes, as the rest is the teacher's. A
finished conversion needs them no more: `forget`.
"""
import glob
import os
import re
import time

import torch

from common.errors import Stop
from common.flags import plural
from common.weights import read_tensors
from model import save
from models.files import fill
from runs.log import cut_log, log_of, pack_optimiser, say, tell, tell_step, unpack_optimiser
from students.judge import Judge
from train import SLOW, adamw, begin_step, clipped, lr_at


def checkpoints(out):
    """The checkpoints of a stopped conversion in folder `out`, one per stage."""
    return sorted(glob.glob(os.path.join(glob.escape(out), 'stage-*.safetensors')))


def forget(out):
    """Delete these checkpoints."""
    for path in checkpoints(out):
        os.remove(path)


def learning(model):
    """The part of its state_dict that a stage changes. The rest is still the teacher's."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {name: x for name, x in model.state_dict().items() if name not in frozen}


class Conversion:
    """One conversion: its flags, its data, log.jsonl, a judge with the table, and a checkpoint per stage.
    about: what the checkpoints say: the flags, the digests of teacher and data, and the tokens"""
    def __init__(self, args, teacher, data, about):
        self.args = args
        self.data = data
        self.about = about
        self.log = log_of(args)
        self.judge = Judge(teacher, data, args.eval_rows, self.log)
        if not args.resume:
            forget(args.out)                                # what a stopped conversion left

    def tell_start(self, name, student, new):
        """Print what is converted, and how many parameters are new. name: of the data"""
        args = self.args
        counts = {name: p.numel() for name, p in student.named_parameters()}
        added = sum(counts[name] for name in new)
        say(f'{args.from_} -> {student.config.summary()}; {name}, {plural(args.batch_size, "row")} of '
            f'{self.data.T} a step; {plural(args.threads, "thread")}; of {sum(counts.values()):,} parameters '
            f'{added:,} are new')

    def train_stage(self, stage, model, losses, steps, lr, new=(), parts=1):
        """Train one stage or control, from where a stopped conversion left it, on a CPU exactly. Parameters
        in `new` get --faster times this lr. losses(step): yields the losses of a step; the loss that is told
        is their sum over `parts`. The model is judged every --eval_every steps; at the end `add_line` does
        that."""
        args = self.args
        path = f'{args.out}/stage-{re.sub("[^a-z0-9]+", "-", stage)}.safetensors'
        opt = adamw(model, lr, 0.0, new, args.faster)
        model.train()
        first = 0
        if args.resume and os.path.exists(path):
            first = self.restore_stage(path, model, opt)
        if args.resume:
            cut_log(self.log, first, stage)
        times = []                                          # of the steps since the last line
        done = first
        with Stop() as stop:
            for step in range(first, steps):
                # forward, backward, clip, step
                began = time.perf_counter()
                rate = lr_at(step, steps, lr)
                begin_step(opt, step, rate, args.seed)
                total = torch.zeros(1, device=self.data.device)
                for loss in losses(step):
                    loss.backward()
                    total += loss.detach()
                norm = clipped(model, total, opt, step, 1.0)
                opt.step()
                model.zero_grad(set_to_none=True)
                times.append(time.perf_counter() - began)
                # log, save, judge
                done = step + 1
                saves = done % args.eval_every == 0 or done == steps
                stops = stop.asked
                if saves or sum(times) > SLOW:
                    ms = 1e3 * sum(times) / len(times)
                    tell_step(self.log, self.data, steps, rate, done, total / parts, norm, ms, stage=stage)
                    times.clear()
                if saves or stops:
                    save(path, model, {**self.about, 'step': done}, pack_optimiser(model, opt),
                         learning(model))
                if saves and done < steps:
                    tell(self.log, stage=stage, step=done, tokens=done * self.judge.tokens,
                         **self.judge.columns_of(model, stage))
                if stops:
                    break
            stop.if_asked(f'after step {done}, which is saved: --resume with this --out goes on')
        model.eval()

    def restore_stage(self, path, model, opt):
        """Restore model and optimiser of a stopped stage -> the steps already done."""
        tensors, meta = read_tensors(path)
        for key, digest in self.about['made_from'].items():
            if meta['made_from'][key] != digest:
                raise ValueError(f'--resume: the {key} is not what the run began with; start anew')
        weights = {name.removeprefix('model.'): x for name, x in tensors.items() if name.startswith('model.')}
        changing = learning(model)
        others = {name: x for name, x in model.state_dict().items() if name not in changing}
        fill(model, others | weights, f'{path}: holds the weights of another model')
        unpack_optimiser(model, opt, tensors)
        return meta['step']
