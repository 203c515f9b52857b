"""Turn a pretrained transformer into an RNN: swap its attention, train, report what was recovered of it.

    python convert.py --from=FOLDER --data=my.txt --recipe=hybrid --dtype=bfloat16 --controls=false
                                            a real model, your text
    python convert.py                       one matrix per head (--recipe=pure), from out/ckpt.safetensors,
                                            a model of train.py --rule=softmax --n_head=4
    python convert.py --recipe=hybrid       64 cached tokens (189 of a large model), a matrix for all others
    python convert.py --recipe=hedgehog     Zhang 2024; also t2r: Kasai 2021; decay: Mao 2022
    python convert.py --from=gpt2 --data=wikitext2          a model of the hub
    python convert.py --from=OWNER/NAME --recipe=hedgehog --lora=8 --data=dialogues.txt:summaries.txt
                                            pairs: a line of one file, then of the other
    python convert.py --from=out/tuned/ckpt.safetensors --export=out/exported       a folder for transformers
    python sample.py --init=out/convert/ckpt.safetensors

A model of train.py's default size takes six minutes on one core, controls included. The steps, in order:

    swap         Make a student: the teacher's weights, but other rules in place of softmax. Feature maps and
                 gates are new parameters. The teacher's attention on 4,096 tokens says how some begin: slots
                 as clusters of its keys, gates so that a head remembers as far as its teacher sees (beside a
                 cache: for a row).
    distil       Stage 1 trains the new parameters, or whole mixers (attention layers). Each layer learns to
                 imitate the teacher's layer on the teacher's inputs.
    fine-tune    Stage 2 trains all weights (or LoRA's) to predict what the teacher predicts, or the text.
    fold         (--fold) Multiply T2R's feature map into W_q and W_k.
    controls     Train the teacher for as many more steps, at two learning rates, and train the student from
                 scratch: what these steps give without a teacher to imitate.

What is recovered is the teacher's perplexity over the student's (of a task: the student's accuracy over the
teacher's). A recipe is a list of flags (RECIPES). Flags that you give override it. Writes ckpt.safetensors,
log.jsonl, result.json (the student's figures) and convert.json into --out. convert.json has the table, how
much attention differs by layer (`order kept`: how often weights rank two keys as q.k does), and the attention
weights of one query. Columns: `low`, `high`, a 95 % interval over rows; `to 512`, what is recovered among the
tokens up to there in a row; `KL`, from the teacher's distribution to the model's, in nats; `of the tuned`,
against the better of the two teachers trained on. The table also has caches without a matrix, one of as many
tokens and some of as many bytes, and the models of --beside. A student with a limited cache is also run under
the policies that it was not trained with, and every student in one text as long as four rows.
"""
import copy
import dataclasses
import functools
import glob
import math
import os
import re
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import models
import train
from common import files
from common.errors import Stop, script
from common.checks import idle
from common.flags import briefly, by_layer, flag, parse, plural, refuse, subset, typed
from common.machine import commit, logits_at_once, pick_device, take_threads, tokens_at_once
from common.terminal import progress, table
from common.weights import read_tensors, state_bytes, weights_digest
from data import prepare
from data.rows import TASK_ROWS, predict, products_in, rows_of
from fastweight import RULES
from hub.folders import to_folder
from look.watch import compared, has_weights, through
from model import load, save
from models.files import Undrawn, fill, overflow_of, whole_config
from models.hybrid import HybridConfig
from runs.log import (cut_log, log_of, next_command, pack_optimiser, say, tell, tell_step,
                      unpack_optimiser)
from runs.starts import PRETRAINED_LR, PRETRAINED_ROW, SMALL, is_large
from students.begin import balance, remember
from students.fold import can_fold, fold
from students.lora import adapt, merge_lora
from train import LR, SLOW, adamw, begin_step, clipped, evaluate, lr_at


# Flags per recipe; `Args` explains them. The papers' recipes use their order of stages and losses, and their
# kind of feature map.
RECIPES = {
    'pure': '--rule=gla-beta --distil=hidden --faster=5',
    'hybrid': '--rule=sink --cache=64 --overflow=sum:slots --distil=mse --faster=5',
    'cache': '--rule=sink --cache=157 --steps=1300',        # as many bytes as hybrid keeps for heads of 32
    'hedgehog': '--rule=sum --phi=hedgehog:listing --distil=ce --loss=next',
    't2r': '--rule=sum --phi=t2r --distil=none --loss=next',
    'decay': '--rule=decay --distil=none --loss=next'}
# For a large teacher, which knows a lot, learns from little and would be destroyed by larger rates
LARGE_RECIPES = RECIPES | {
    'pure': '--rule=gla-beta --gate_rank=16 --distil=mse --faster=20 --distil_steps=80 --steps=408 --lr=1e-4',
    'hybrid': '--rule=sink --cache=189 --overflow=gated:slots:64 --positions=compress --distil=mse '
              '--faster=20',
    'cache': '--rule=sink --cache=253 --positions=compress --steps=488'}        # heads of 64
LARGE = '--batch_size=1 --distil_steps=8 --steps=480 --eval_rows=16'        # defaults with all of these
ATTENTIONS = 'self', 'cross', 'encoder'     # the attention layers of a translator; self: its decoder's
FIRST = 256                                             # tokens of the first range where it is judged
COMPARED = 'sink', 'tova', 'h2o'                        # policies to compare with, see `caches`
LONG = 1024                                             # most tokens per row without --row: T x T tensors
BEGIN = 4096                                            # tokens at which new parameters begin, see `begin_as`
LONGER = 4                                              # rows of the text in which it is judged beyond them
LOOK = 1024                                             # tokens whose attention weights are compared
SWAP_LR = 0.25                                          # divided by the width: 4e-3 at width 64, 1e-3 at 256
LORA_FASTER = 10                                        # its small matrices bear more, and begin at zero
TEACHER_LRS = 1e-3, 1e-4                                # learning rates of the teacher that trains on
LARGE_TEACHER_LRS = 1e-4, 3e-5                          # of a large one, which 1e-3 would destroy
OFTEN = 'from recipe data steps distil_steps lora row dtype controls out export resume'    # first in --help


@dataclass
class Args:
    recipe: str = flag('pure', 'what replaces softmax, and how it is trained: a list of flags; flags that '
                               'you give override it', list(RECIPES))
    from_: str = flag('out/ckpt.safetensors', 'checkpoint; gpt2; OWNER/NAME; a folder', path=True)
    data: str = flag('', 'text, task, pairs or conversations; default: what train.py gave the teacher',
                     path=True)
    out: str = flag('out/convert', 'folder for the checkpoint, table and log', path=True)
    swap: str = flag(','.join(ATTENTIONS), 'in a translator: which attention to swap')
    distil: str = flag('auto', 'stage 1, layer by layer: new parameters match attention weights (ce) or '
                               'outputs (mse), whole mixers hidden states; auto: ce if there are weights, '
                               'else mse',
                       ['auto', 'ce', 'mse', 'hidden', 'none'])
    distil_steps: int = flag(300, 'steps of stage 1', low=0, high=10 ** 9)
    distil_lr: float = flag(1e-2, 'peak learning rate of stage 1', low=0, high=100)
    steps: int = flag(1000, 'steps of stage 2, fine-tuning', low=0, high=10 ** 9)
    lr: float = flag(None, f'peak learning rate of stage 2; default: {SWAP_LR:g} / width; of a large model, '
                     f'or of a cache, {PRETRAINED_LR:g} / width; with --lora ten times that', low=0,
                     high=100)
    faster: float = flag(1.0, 'stage 2: a factor on the learning rate of new parameters; with --lora, whose '
                              'rate is ten times as high, a recipe\'s is divided by ten', low=0, high=1000)
    loss: str = flag('kl', 'stage 2: predict the next token, or match the teacher (KL)', ['next', 'kl'])
    lora: int = flag(0, 'rank of LoRA on W_q, W_k, W_v, W_o in stage 2; 0: all weights', low=0, high=2 ** 17)
    batch_size: int = flag(4, 'rows per step', low=1, high=2 ** 20)
    keep: int = flag(0, 'so many layers stay softmax, spread over the depth', low=0, high=2 ** 16)
    row: int = flag(0, 'tokens per row; 0: as in the teacher\'s training, at most 1,024; of a large model '
                       'at most 512', low=0, high=2 ** 24)
    eval_rows: int = flag(64, f'validation rows for each evaluation; of a classifier {TASK_ROWS}', low=2,
                          high=10 ** 9)
    export: str = flag('', 'only write the model of --from into this folder, for transformers', path=True)
    fold: bool = flag(False, 'multiply phi into W_q and W_k at the end; needs --phi=t2r, no rope')
    beside: str = flag('', 'models to judge on the same rows, separated by commas: a cache of as many bytes '
                           'that was trained alike (--recipe=cache)', path=True)
    controls: bool = flag(True, 'also train the teacher for as many steps, at two rates, and the student '
                                'from scratch')
    eval_every: int = flag(250, 'steps between evaluations; each also saves, for --resume', low=1,
                           high=10 ** 9)
    resume: bool = flag(False, 'continue the stopped conversion in --out')
    seed: int = flag(0, 'seed of new weights and the data order', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda')
    dtype: str = flag('float32', 'in matrix products; S is always fp32', ['float32', 'bfloat16'])
    threads: int = flag(None, 'CPU threads; default: the fastest, by trial', low=1, high=1024)


StudentFlags = subset(HybridConfig, 'layers', 'phi', 'norm', 'out_norm', 'beta_max', 'gate_rank', 'cache', 'sinks',
                 'overflow', 'positions', rule=flag('sum', 'what replaces softmax', RULES))
HELP = '\n'.join([
    __doc__ or '',
    'Recipes. Their flags replace the defaults below. With another --rule, only their training flags do:',
    *(f'    {name:<12} {row}' for name, row in RECIPES.items()),
    f'For a teacher of {SMALL // 10 ** 6} million parameters or more the defaults are',
    f'    {LARGE}',
    'and the recipes',
    *(f'    {name:<12} {row}' for name, row in LARGE_RECIPES.items() if row != RECIPES[name])])


# ---- the swap ----------------------------------------------------------------------------------------------
def swap(teacher, changes, places=ATTENTIONS):
    """Make a model with other rules, which shares the teacher's weights until they are trained -> the student,
    names of its new parameters. changes: flags of `StudentFlags`; places: of a translator, which to swap"""
    old = teacher.config
    pos = 'rope' if old.has_rope() else old.pos             # W_q and W_k were learned with rope: keep it
    student = models.changed(teacher, pos=pos, **rules_after(old, changes, places))
    twins = student.mixers()
    for name, mixer in teacher.mixers().items():
        memory = mixer.memory
        twin = twins[name].memory
        stays = twin.rule.matrix and memory.rule.matrix and (twin.map, twin.norm) == (memory.map, memory.norm)
        if memory.rule.matrix and not stays:
            raise ValueError(f'{name} of the teacher has fast weights already, with --phi={memory.map} '
                             f'--norm={memory.norm}, which are flags of all layers: give these')
    if student.config.every_rule() == old.every_rule():
        raise ValueError(f'layers stay {briefly(old.every_rule())}: nothing would change; take another '
                         '--rule, --layers or --swap')
    missing, extra = fill(student, teacher.state_dict(),
                          'the teacher\'s weights do not fit these rules and maps',
                          strict=False, assign=True)
    if extra:
        raise ValueError(f'the teacher has {extra[0]}, which no rule of the student has room for')
    student.to(teacher.embed.weight.device).eval()
    return student, dict(student.named_parameters()).keys() & set(missing)


def rules_after(old, changes, places):
    """-> the changes, with the rule of every layer added. --rule replaces softmax in the given places; other
    rules stay. Softmax over a source also stays if --rule caches few tokens, since a source is read as a
    whole."""
    rule = changes.get('rule', old.rule)
    layers = old.rules
    if 'self' in places:
        layers = [rule if name == 'softmax' else name for name in layers]
    else:
        changes = {**changes, 'rule': old.rule}
    rules = {'layers': ','.join(layers)}
    if len(set(layers)) == 1:
        rules = {'rule': layers[0], 'layers': ''}
    of_source = getattr(old, 'source_rules', ())            # a translator's
    for place, field, name in zip(('encoder', 'cross'), ('encoder_rule', 'cross'), of_source):
        swaps = place in places and name == 'softmax' and not RULES[rule].bounded
        rules[field] = rule if swaps else name
    return {**rules, **changes}


@torch.no_grad()
def begin_as(teacher, student, x, pad=None):
    """Initialise new parameters from the teacher's attention on the tokens x (B, T): slots as clusters of its
    keys, gates by how far back the heads look (`remember`) and, beside a cache, the weight of the keys that
    only the matrix has (`balance`)."""
    for seen in through(teacher, x, pad):
        twin = student.get_submodule(seen.name)
        memory = twin.memory
        beside = getattr(memory, 'overflow', None)
        matrix = beside or memory
        swapped = seen.mixer.memory.rule.keeps              # the teacher has softmax there
        if seen.crosses or not (swapped and matrix.rule.matrix):        # positions of two texts: no distance
            continue
        if hasattr(matrix.phi, 'begin'):
            matrix.phi.begin(seen.seen_by(twin)[1])
        remember(seen, matrix.gates, beside_cache=beside is not None)
        if beside is not None:
            balance(seen, twin)


# ---- stage 1: layer by layer -------------------------------------------------------------------------------
def changed(student, new):
    """The student's mixers that have new parameters, by name."""
    return {name: mixer for name, mixer in student.mixers().items()
            if any(parameter.startswith(f'{name}.') for parameter in new)}


def what_to_match(wish, student, new):
    """-> the kind of stage 1. `auto` becomes ce if all new mixers have attention weights, else mse. Without
    new parameters it is `none`."""
    if not new:
        return 'none'
    comparable = all(has_weights(mixer) for mixer in changed(student, new).values())
    if wish == 'ce' and not comparable:
        raise ValueError('--distil=ce compares attention weights, and this rule has none: take mse or hidden')
    if wish == 'auto':
        wish = 'ce' if comparable else 'mse'
    return wish


def unshare(student, names):
    """Copy what training will change, so that the teacher keeps its own: the parameters of these names, and
    random features, which are redrawn. With LoRA the other weights stay shared and need no memory."""
    for name, p in student.named_parameters():
        if name in names:
            p.data = p.data.clone()
    for x in student.buffers():
        x.data = x.data.clone()


def mismatch(kind, seen, student):
    """The loss of stage 1: a scalar that compares a mixer (attention layer) of the student, or for `hidden` a
    block, with the teacher's, on the teacher's input. Mean over the positions without padding.
        hidden    mean square error of the block's output (MOHAWK, arXiv:2408.10189)
        ce        cross entropy -sum_s a_ts log w_ts of the teacher's weights a, the student's w (Zhang 2024,
                  eq. 4)
        mse       mean square error of the attention output, after the student's out_norm, divided by the
                  teacher's variance in these rows (LoLCATs, arXiv:2410.10254)
    seen: a `Seen`, which `through` yields for the teacher"""
    twin = student.get_submodule(seen.name)
    real = slice(None)
    if seen.real is not None:
        real = seen.real
    if kind == 'hidden':
        error = seen.result_of(student.get_submodule(seen.layer)) - seen.y
        return error.square().mean(-1)[real].mean()
    if kind == 'ce':
        a = seen.weights(seen.mixer)
        w = seen.weights(twin)
        return -(a * w.clamp(min=1e-8).log()).sum(-1).mean(1)[real].mean()
    wanted = seen.o                                          # (B, H, T, head_dim)
    output = seen.outputs(twin)
    if twin.out_norm is not None:
        output = twin.out_norm(output)
    error = (output - wanted).square().mean((1, 3))
    return error[real].mean() / wanted.transpose(1, 2)[real].var()


def distil(run, teacher, student, names, kind, steps, lr):
    """Stage 1: train the parameters of these names on `mismatch` of this kind. Every layer gets the teacher's
    input, so layers are independent, and backward holds the (T, T) matrices of only one at a time."""
    data = run.data

    def losses(step):
        begin = data.starts(step)
        for i in range(data.accum):
            x, _ = data.batch(begin, i)
            with torch.no_grad(), products_in(data.dtype, data.device):
                for seen in through(teacher, x, data.padding):
                    if seen.name not in compared_by:
                        continue
                    with torch.enable_grad():
                        far = mismatch(kind, seen, student)
                        if far.requires_grad:               # some kinds of loss do not use all parameters
                            yield far / data.accum

    unshare(student, names)
    for name, p in student.named_parameters():
        p.requires_grad_(name in names)
    mixers = [name for name in teacher.mixers()             # hidden compares a block at once
              if kind != 'hidden' or not name.endswith('.cross')]
    compared_by = set()                                     # those in whose layer something learns
    for mixer in mixers:
        layer = f'{mixer.rpartition(".")[0]}.'
        if any(name.startswith(layer) for name in names):
            compared_by.add(mixer)
    run.train_stage(f'distil ({kind})', student, losses, steps, lr, parts=len(compared_by))
    student.requires_grad_(True)


# ---- stage 2: the whole model ------------------------------------------------------------------------------
def divergences(model, teacher, data, step):
    """Like train.losses, but KL(teacher || model) where there are targets"""
    begin = data.starts(step)
    share = data.targets(begin)
    for i in range(data.accum):
        x, y = data.batch(begin, i)
        logits, _, _ = data.predict(model, x, y)
        with torch.no_grad():
            wanted, _, _ = data.predict(teacher, x, y)
            wanted = wanted.log_softmax(-1)
        yield F.kl_div(logits.log_softmax(-1), wanted, reduction='sum', log_target=True) / share


def finetune(run, stage, model, steps, lr, after=0, teacher=None, lora=0, new=()):
    """Stage 2 and the controls: train on the targets or, with a teacher, on its distribution at the same
    positions, KL(teacher || model). All weights learn. With lora > 0, only LoRA of that rank and the
    parameters in `new` learn. after: steps of the stage before, so that other rows are drawn."""
    def losses(step):
        if teacher is None:
            return train.losses(model, run.data, [None] * run.data.accum, after + step)
        return divergences(model, teacher, run.data, after + step)

    torch.manual_seed(run.args.seed)                        # for LoRA's A
    adapted = []
    if lora:
        adapted = adapt(model, lora, new)
    run.train_stage(stage, model, losses, steps, lr, new)
    merge_lora(adapted)
    model.requires_grad_(True)


# ---- what is recovered of the teacher ----------------------------------------------------------------------
def logits_along(model, x, y, what, dtype):
    """Read rows x (B, T), each from an empty state, in pieces, so that memory hardly grows with B and T.
    Yield the piece as an index, its logits (n, vocab), its targets of y (n,)"""
    B, T = x.shape
    tokens = tokens_at_once(model.config.vocab_size, x.device)
    segment = max(1, min(T, 512, tokens))
    at_once = max(1, tokens // segment)
    pieces = [(i, t) for i in range(0, B, at_once) for t in range(0, T, segment)]
    for i, t in progress(pieces, what):
        if t == 0:
            state = None
        piece = slice(i, i + at_once), slice(t, t + segment)
        logits, targets, state = predict(model, x[piece], y[piece], state, dtype)
        yield piece, logits, targets


@torch.inference_mode()
def nats_along(model, x, y, what, dtype=torch.float32):
    """Nats (B, T) of the targets y (B, T) of rows x (B, T), each from an empty state. what: begins the
    progress bar; dtype: of the matrix products"""
    nats = torch.empty(x.shape)
    for piece, logits, targets in logits_along(model, x, y, what, dtype):
        nats[piece] = F.cross_entropy(logits, targets, reduction='none').view_as(nats[piece])
    return nats


@torch.inference_mode()
def nats_and_kl(teacher, model, x, y, what, dtype=torch.float32):
    """As `nats_along`, of both, and KL(teacher || model) at each position -> nats of the teacher, of the
    model, KL (B, T)"""
    exact, nats, kl = torch.empty(3, *x.shape)
    both = zip(logits_along(teacher, x, y, '', dtype), logits_along(model, x, y, what, dtype))
    for (_, wanted, _), (piece, logits, targets) in both:
        log_p = logits.log_softmax(-1)
        log_wanted = wanted.log_softmax(-1)
        exact[piece] = F.nll_loss(log_wanted, targets, reduction='none').view_as(exact[piece])
        nats[piece] = F.nll_loss(log_p, targets, reduction='none').view_as(nats[piece])
        kl[piece] = F.kl_div(log_p, log_wanted, log_target=True, reduction='none').sum(-1).view_as(kl[piece])
    return exact, nats, kl


def ranges(T, first):
    """Yield (start, end) of ranges of positions: up to `first`, from there to twice that, and so on to T."""
    start = 0
    end = first
    while start < T:
        yield start, min(end, T)
        start = end
        end *= 2


def recovered(gain):
    """What a model has recovered of the teacher's perplexity per token -> columns of the table. gain (rows,
    T): nats of the teacher less those of the model. `low` and `high` are a 95 % interval over rows. Then come
    the shares among the first 256 tokens, from there to 512, to 1,024, ..."""
    by_row = gain.mean(1)
    mean = by_row.mean()
    half = 1.96 * by_row.std() / len(by_row) ** 0.5 if len(by_row) > 1 else math.inf
    row = {'recovered': mean.exp().item(), 'low': (mean - half).exp().item(),
           'high': (mean + half).exp().item()}
    T = gain.shape[1]
    for start, end in ranges(T, FIRST) if T > FIRST else ():
        row[f'to {end:,}'] = gain[:, start:end].mean().exp().item()
    return row


def cached_by(model, rules, **changes):
    """The same weights with other rules, which cache, and other flags of Config"""
    with Undrawn():
        other = models.changed(model, layers=','.join(rules), **changes)
    fill(other, model.state_dict(), 'other weights', assign=True)
    return other.to(model.embed.weight.device).eval()       # buffers, too


def caches(teacher, student):
    """The teacher with limited caches, to compare with -> names, models: the cache that stands beside the
    student's matrix alone, and caches of as many bytes as all that the student keeps."""
    c = student.config
    if student.task != 'complete':
        return
    near = {'positions': c.positions} if getattr(c, 'positions', 'true') != 'true' else {}
    new = [rule != before for rule, before in zip(c.rules, teacher.config.rules)]
    state = student.read(torch.zeros(1, 1, dtype=torch.long, device=student.embed.weight.device))
    kept = [sum(x.nbytes for x in layer['mixer'].values()) for layer in state['layers']]
    heads = getattr(c, 'n_kv_head', 0) or c.n_head
    a_token = heads * (2 * 4 * c.width_of_head() + 12)      # key, value, position, sum of weights
    size = max((bytes for bytes, swapped in zip(kept, new) if swapped), default=0) // a_token
    if overflow_of(c) and c.cache:
        yield f'{c.cache} cached, no matrix', cached_by(teacher, c.rules, cache=c.cache, sinks=c.sinks, **near)
    for policy in COMPARED if size > 0 else ():
        rules = [policy if swapped else rule for rule, swapped in zip(c.rules, new)]
        if (size, rules) != (c.cache, c.rules):
            given = near if policy == 'sink' else {}        # others would be read step by step
            model = cached_by(teacher, rules, cache=size, sinks=min(4, size - 1), **given)
            yield f'{size} cached by {policy}: as many bytes', model


def bytes_after(model, T):
    """The bytes of a model's state after T tokens; None for an encoder or a translator. A cache without a
    limit grows by as much with every token."""
    if model.task != 'complete':
        return None
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.embed.weight.device)
    one, two = (state_bytes(model.read(tokens[:, :n])) for n in (1, 2))
    return one + (T - 1) * (two - one)


def under_policies(name, student):
    """A student by its name and, if its cache is limited, under the policies that it was not trained with, as
    'NAME, h2o' -> {name: model}"""
    rules = student.config.rules
    found = {name: student}
    for policy in COMPARED:
        others = [policy if RULES[rule].bounded else rule for rule in rules]
        if others != rules:
            found[f'{name}, {policy}'] = cached_by(student, others)
    return found


# ---- a conversion: its stages, its table -------------------------------------------------------------------
def share(row, base):
    """The share of a teacher that a model has recovered; row, base: their lines of the table. For a text it
    is the teacher's perplexity per token / the model's; else the model's accuracy / the teacher's. None if
    the teacher's accuracy is 0."""
    if 'accuracy' not in row:
        return base['perplexity'] / row['perplexity']
    if base['accuracy'] == 0:
        return None
    return row['accuracy'] / base['accuracy']


def stages(out):
    """The checkpoints of a stopped conversion in folder `out`, one per stage."""
    return sorted(glob.glob(os.path.join(glob.escape(out), 'stage-*.safetensors')))


def forget(paths):
    """Delete these checkpoints of stages."""
    for path in paths:
        os.remove(path)


def learned(model):
    """The part of its state_dict that a stage changes. The rest is still the teacher's."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {name: x for name, x in model.state_dict().items() if name not in frozen}


class Conversion:
    """One conversion: its data, the lines of its table, log.jsonl, and a checkpoint per stage for --resume.
    about: what the checkpoints say: the flags, the digests of teacher and data, and the tokens"""
    def __init__(self, args, teacher, data, about):
        self.args = args
        self.teacher = teacher
        self.data = data
        self.about = about
        self.table = []
        self.tokens = args.batch_size * data.T              # in a step
        self.of_text = data.meta.kind == 'text'
        n = len(data.val)
        if self.of_text:
            n -= (n - (data.meta.bos is None)) % data.T     # whole rows
        self.begin = data.blocks(args.eval_rows, n)
        self.x, self.y = data.rows(data.val, self.begin)
        self.by_row = {}                                    # of a text: each model's nats by row
        self.log = log_of(args)
        if not args.resume:
            forget(stages(args.out))                        # what a stopped conversion left

    def columns_of(self, model, what):
        """Evaluate a model beside the teacher on --eval_rows rows, each from an empty state -> columns of the
        table. what: the model's name"""
        label = f'{what}, validation'
        if not self.of_text:
            loss, right = evaluate(model, self.data, self.begin, label=label)
            row = {'perplexity': math.exp(min(loss, 80)), **right}
            return {**row, 'recovered': share(row, self.table[0] if self.table else row)}
        was_training = model.training
        model.eval()
        exact, nats, kl = nats_and_kl(self.teacher, model, self.x, self.y, label, self.data.dtype)
        model.train(was_training)
        self.by_row[what] = nats.mean(1, keepdim=True)
        return {'perplexity': math.exp(min(nats.mean().item(), 80)), **recovered(exact - nats),
                'KL': kl.mean().item()}

    def add_line(self, name, model, steps=0):
        """Add a line to the table, print and log it: how good a model is after so many steps."""
        row = self.columns_of(model, name)
        self.table.append({'model': name, **row, 'tokens': steps * self.tokens,
                           'state bytes': bytes_after(model, self.data.T)})
        if 'accuracy' in row:
            text = self.data.score(math.log(row['perplexity']), row, self.begin)
        else:
            text = (f'perplexity {row["perplexity"]:.4g}, recovered {row["recovered"]:.1%} a token '
                    f'({row["low"]:.1%} to {row["high"]:.1%})')
        tell(self.log, f'{name}: {text}', model=name, **row)

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
                began = time.perf_counter()
                rate = lr_at(step, steps, lr)
                begin_step(opt, step, rate, args.seed)
                loss = torch.zeros(1, device=self.data.device)
                for part in losses(step):                   # the gradients add up
                    part.backward()
                    loss += part.detach()
                norm = clipped(model, loss, opt, step, 1.0)
                opt.step()
                model.zero_grad(set_to_none=True)
                times.append(time.perf_counter() - began)
                done = step + 1
                saves = done % args.eval_every == 0 or done == steps
                stops = stop.asked
                if saves or sum(times) > SLOW:
                    ms = 1e3 * sum(times) / len(times)
                    tell_step(self.log, self.data, steps, rate, done, loss / parts, norm, ms, stage=stage)
                    times.clear()
                if saves or stops:
                    save(path, model, {**self.about, 'step': done}, pack_optimiser(model, opt),
                         learned(model))
                if saves and done < steps:
                    tell(self.log, stage=stage, step=done, tokens=done * self.tokens,
                         **self.columns_of(model, stage))
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
        changing = learned(model)
        others = {name: x for name, x in model.state_dict().items() if name not in changing}
        fill(model, others | weights, f'{path}: holds the weights of another model')
        unpack_optimiser(model, opt, tensors)
        return meta['step']


def controls(run, teacher, cls, config, steps):
    """Run the controls, on the same rows and with as many steps as the student had in all. First the teacher
    learns the next token, at two rates; the larger one harms a converged teacher. The student is compared
    with the better one, as an undertrained teacher is easy to match. Then a student learns from scratch."""
    rates = LARGE_TEACHER_LRS if is_large(teacher) else TEACHER_LRS
    if run.args.lora:                                       # which bears more
        rates = [LORA_FASTER * lr for lr in rates]
    for lr in rates:
        twin = copy.deepcopy(teacher)
        stage = f'control: teacher, {lr:g}'
        finetune(run, stage, twin, steps, lr, lora=run.args.lora)
        run.add_line(stage, twin, steps)
    tuned = max(run.table[-len(rates):], key=lambda row: row['recovered'] or 0)
    torch.manual_seed(run.args.seed)
    anew = cls(config).to(run.data.device)
    finetune(run, 'control: from scratch', anew, steps, LR)
    run.add_line('control: student from scratch', anew, steps)
    for row in run.table:
        row['of the tuned'] = share(row, tuned)


# ---- the run -----------------------------------------------------------------------------------------------
def flags_of(argv):
    """The given flags, with --resume also those of the stopped conversion -> flags of Args, of the student"""
    given, changes = parse(argv, HELP, Args, StudentFlags, first=OFTEN)
    if 'export' in given:
        refuse(not_exporting(given, changes))
    if given.get('resume'):
        began, kind = stopped(given, changes)
        return {**began, **given}, {**kind, **changes}
    return given, changes


def by_recipe(given, changes, teacher):
    """Merge the given flags with those of the recipe for such a teacher -> flags of Args, of the student"""
    large = is_large(teacher)
    way = {}
    recipes = RECIPES
    if large:
        way, _ = parse(LARGE.split(), HELP, Args, StudentFlags)
        recipes = LARGE_RECIPES
    own, kind = parse(recipes[given.get('recipe', Args.recipe)].split(), HELP, Args, StudentFlags)
    rule = changes.get('rule', kind['rule'])
    alike = rule == kind['rule'] or {rule, kind['rule']} == {'window', 'sink'}
    if 'layers' in changes or not alike:                    # another rule: drop the recipe's map, norm, cache
        kind = {'rule': StudentFlags.rule}
    if not teacher.config.has_rope():                          # learned positions stay where they are
        kind.pop('positions', None)
    changes = {**kind, **changes}
    rules = by_layer(changes.get('layers'), changes['rule'], teacher.config.n_layer)
    bounded = any(RULES[name].bounded for name in rules if name in RULES)
    near = large or bounded                                 # what begins near its teacher may not leave it
    lr = (PRETRAINED_LR if near else SWAP_LR) / teacher.config.n_embd
    flags = {'lr': lr, 'faster': Args.faster, **way, **own}
    if teacher.task == 'classify':
        flags['eval_rows'] = TASK_ROWS                      # each row has one target alone
    if near and given.get('lora'):
        flags['lr'] *= LORA_FASTER
        flags['faster'] /= LORA_FASTER                      # new parameters learn as fast as without LoRA
    row = given.get('row') or min(teacher.config.block_size, PRETRAINED_ROW if large else LONG)
    return {**flags, **given, 'row': row}, changes


def not_exporting(given, changes):
    """For `refuse`: flags that go beyond writing a folder."""
    yield not given['export'], '--export=: give a folder'
    yield files.lies_in(given.get('from_', Args.from_), given['export']), (
        f'--export={given["export"]}: it holds the model of --from; take another folder')
    for name in sorted(given.keys() | changes.keys()):
        yield name not in ('export', 'from_', 'device', 'threads'), (
            f'--{name} means nothing: --export only writes the model of --from')


def stopped(given, changes):
    """The flags of the stopped conversion, as two dicts. Only --out and --device may differ."""
    out = given.get('out', Args.out)
    paths = stages(out)
    if not paths:
        raise ValueError(f'--resume: no conversion was stopped in --out={out} (one that was finished has '
                         'nothing to resume); start anew')
    _, meta = read_tensors(paths[0])
    typed(Args, meta['args'], paths[0])                     # another version may have had others
    began = meta['args'] | meta['changes'] | {'resume': True}
    for name, value in (given | changes).items():
        if began.get(name) != value and name not in ('out', 'device'):
            raise ValueError(f'--{name.strip("_")}={value}: the run began with {began.get(name)!r}; leave '
                             'the flag out, or start anew without --resume')
    return meta['args'], meta['changes']


def can_become_an_rnn(rules):
    """Whether there is softmax among these rules, and beside it only rules with a matrix."""
    keeps = {RULES[rule].keeps for rule in rules}
    return {'all'} <= keeps <= {'all', None}


def cannot_teach(args, config):
    """For `refuse`: what is wrong with the flags or with a teacher of this config."""
    yield set(args.swap.split(',')) - set(ATTENTIONS), (
        f'--swap={args.swap}: choose from {", ".join(ATTENTIONS)}')
    yield not can_become_an_rnn(config.every_rule()), (
        f'{args.from_}: its layers are {briefly(config.every_rule())}; a teacher has softmax layers, and no '
        'other cache: python train.py --rule=softmax --n_head=4 --out=out/softmax makes one')
    yield files.lies_in(args.from_, args.out), f'--out={args.out}: it holds the teacher; take another folder'
    layers = config.rules.count('softmax')
    yield args.keep and args.keep >= layers, (
        f'--keep={args.keep}: expected fewer than the {layers} softmax layers')
    yield args.row > config.block_size, (
        f'--row={args.row}: the teacher was trained on rows of {config.block_size}; give at most that')


def tell_start(args, name, data, student, new):
    """Print what is converted, and how many parameters are new. name: of the data"""
    counts = {name: p.numel() for name, p in student.named_parameters()}
    added = sum(counts[name] for name in new)
    say(f'{args.from_} -> {student.config.summary()}; {name}, {plural(args.batch_size, "row")} of {data.T} a '
        f'step; {plural(args.threads, "thread")}; of {sum(counts.values()):,} parameters {added:,} are new')


def untrained_student(args, changes, teacher, data):
    """The student before training -> student, names of its new parameters. With --keep, `changes` get a rule
    for each layer."""
    many = math.ceil(BEGIN / data.T)
    begin = np.concatenate([data.starts(step) for step in range(0, many, args.batch_size)])[:many]
    x, _ = data.rows(data.train, begin)
    places = args.swap.split(',')
    student, new = swap(teacher, changes, places)
    if args.keep:
        old = [i for i, rule in enumerate(teacher.config.rules) if rule == 'softmax']
        kept = [old[(2 * i + 1) * len(old) // (2 * args.keep)] for i in range(args.keep)]
        rules = enumerate(student.config.rules)
        changes['layers'] = ','.join('softmax' if i in kept else rule for i, rule in rules)
        student, new = swap(teacher, changes, places)
    config = student.config
    refuse(student.cannot_train(data.meta, args.steps))
    if any(RULES[rule].bounded for rule in config.rules) and config.cache >= data.T:
        raise ValueError(f'--cache={config.cache}: rows of {data.T} tokens never leave the cache, so nothing '
                         'would be learned; take a smaller --cache, or a longer --row')
    refuse(idle({**changes, 'layers': ''}, config))         # --layers and --rule may both be given here
    if new and is_large(teacher):                           # then it takes a minute
        say(f'new parameters begin by how the teacher looks at {x.numel():,} tokens')
    if new:
        begin_as(teacher, student, x, data.padding)
    return student, new


def data_of(args, meta, device):
    """-> the rows to train on and to judge by, and what the data is called"""
    like = dataclasses.replace(meta['data'], most=args.row)
    *sides, of_data, name = prepare.for_model(args.from_, {**meta, 'data': like}, args.data, args.row)
    classes = meta['data'].classes
    if 0 < classes < of_data.classes:
        raise ValueError(f'--data={name}: {of_data.classes} classes, but {args.from_} knows {classes}')
    T = of_data.row or args.row
    whole = args.batch_size * T * of_data.vocab_size <= logits_at_once(device)
    parts = 1 if whole else args.batch_size                 # all rows of a step at once, or one by one
    return rows_of(*sides, of_data, T, device, args.batch_size // parts, args.seed, parts,
                   dtype=getattr(torch, args.dtype)), name


def both_stages(run, teacher, student, new, kind, distilled):
    """Stages 1 and 2, a line of the table after each -> what `compared` says: lines, one query"""
    args = run.args
    some = run.begin[:max(1, LOOK // run.data.T)]
    texts = [run.data.rows(run.data.val, [begin])[0] for begin in some]
    run.add_line('swapped', student)
    layers, query = compared('swapped', teacher, student, texts)
    if distilled:
        names = new
        if kind == 'hidden':
            mixers = tuple(f'{name}.' for name in changed(student, new))
            names = {name for name, _ in student.named_parameters() if name.startswith(mixers)}
        distil(run, teacher, student, names, kind, distilled, args.distil_lr)
        run.add_line(f'distilled ({kind})', student, distilled)
        again, seen = compared('distilled', teacher, student, texts)
        layers += again
        query |= seen
    if args.steps:
        guide = teacher if args.loss == 'kl' else None
        unshare(student, new if args.lora else dict(student.named_parameters()))
        finetune(run, 'fine-tune', student, args.steps, args.lr, distilled, guide, args.lora, new)
        run.add_line('fine-tuned', student, distilled + args.steps)
    return layers, query


def in_one_text(run, name, teacher, student):
    """Does the student hold beyond the rows that it was trained on? -> its perplexity in one text of LONGER
    rows over the teacher's, which reads them one by one: a figure for each. Empty if that cannot be told"""
    T = run.data.T
    n = LONGER * T
    if not run.of_text or len(run.data.val) <= n or (student.max_len or n) < n:
        return []
    parts = [(student, [0], n), (teacher, range(0, n, T), T)]
    student_nats, teacher_nats = (
        nats_along(model, *dataclasses.replace(run.data, T=length).rows(run.data.val, [*begin]), 'one text',
                   run.data.dtype) for model, begin, length in parts)
    over = (student_nats.view(LONGER, T) - teacher_nats).mean(1).exp().tolist()
    say(f'{name} in one text of {n:,} tokens: perplexity over the teacher\'s in rows of {T}, row by row: '
        f'{", ".join(f"{x:.2f}" for x in over)}')
    return over


def models_beside(paths, of, data, device):
    """Yield path and model of each of --beside. ValueError if its tokens are not those of `data`, the tokens
    of the model in `of`."""
    for source in filter(None, paths.split(',')):
        model, meta = load(source, device)
        if not data.has_tokens_of(meta['data']):
            tokens = meta['data'].summary()
            raise ValueError(f'--beside={source}: its tokens ({tokens}) are not those of {of}; train both '
                             'on the same data')
        yield source, model


def over_the_best(nats, name, others):
    """The perplexity of a model over that of the best of others, row by row -> the name of the best, the
    ratio, its 95 % interval over rows. nats (rows, T) by name"""
    best = min(others, key=lambda other: nats[other].mean())
    over = recovered(nats[name] - nats[best])
    return best, over['recovered'], over['low'], over['high']


@script
def main(argv):
    given, changes = flags_of(argv)
    args = Args(**given)
    device = pick_device(args.device)
    teacher, meta = load(args.from_, device)
    if args.export:
        to_folder(args.export, teacher.state_dict(), whole_config(teacher.config), meta['data'])
        say(f'{args.export}: transformers reads this folder, and so does --from')
        return
    if not args.resume:
        given, changes = by_recipe(given, changes, teacher)
        args = Args(**given)
    refuse(cannot_teach(args, teacher.config))
    take_threads(args.threads, device, functools.partial(teacher.first_layer, 1, 128))
    args.threads = torch.get_num_threads()                  # the last bits depend on it; --resume keeps it
    beside = list(models_beside(args.beside, args.from_, meta['data'], device))
    data, name = data_of(args, meta, device)
    torch.manual_seed(args.seed)
    student, new = untrained_student(args, changes, teacher, data)
    if args.fold:
        can_fold(student)
    kind = what_to_match(args.distil, student, new)

    made_from = {'teacher': weights_digest(teacher, meta), 'data': data.meta.train['sha256']}
    about = {'args': dataclasses.asdict(args), 'changes': changes, 'made_from': made_from,
             'data': meta['data']}
    run = Conversion(args, teacher, data, about)
    tell_start(args, name, data, student, new)
    distilled = args.distil_steps if kind != 'none' else 0  # batches of stage 1
    run.add_line('teacher', teacher)
    for cached, model in caches(teacher, student):
        run.add_line(cached, model)
    for source, model in beside:
        for form, other in under_policies(source, model).items():
            run.add_line(form, other)
    others = list(run.by_row)[1:]                           # but for the teacher
    layers, query = both_stages(run, teacher, student, new, kind, distilled)
    over_best = None
    if others:
        over_best = over_the_best(run.by_row, run.table[-1]['model'], others)
        say('row by row, perplexity over that of the best of the others, '
            '{}: {:.3f} ({:.3f} to {:.3f})'.format(*over_best))
    plain = type(student), student.config
    if args.fold:
        student = fold(student)
    save(f'{args.out}/ckpt.safetensors', student,
         {'step': args.steps, 'data': meta['data'], 'args': {'data': name}, 'from': args.from_})
    figures = {**run.table[-1], 'commit': commit(), **dataclasses.asdict(args)}
    figures['before'] = run.table[-2].get('accuracy')       # the last stage
    files.write_json(f'{args.out}/result.json', {**figures, **dataclasses.asdict(student.config)})
    one_text = {source: in_one_text(run, source, teacher, model)
                for source, model in [(args.out, student), *beside]}
    for form, model in under_policies('the same', student).items():
        if model is not student:
            run.add_line(form, model, distilled + args.steps)
    if args.controls and args.steps:
        controls(run, teacher, *plain, distilled + args.steps)

    print()
    table(run.table)
    print()
    files.write_json(f'{args.out}/convert.json', {
        'args': dataclasses.asdict(args), 'config': dataclasses.asdict(student.config), 'distil': kind,
        'table': run.table, 'layers': layers, 'query': query, 'in one text': one_text,
        'over the best other': over_best})
    print(f'{args.out}/convert.json has this table; {next_command(args.out, meta["data"])}')
    forget(stages(args.out))


if __name__ == '__main__':
    sys.exit(main())
